import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.kv.manager import KVManager, PagedTokens
from jaxinfer.kv.pages import PageGroup

GROUP = st.one_of(
    st.just(PageGroup()),
    st.builds(PageGroup, st.sampled_from(["sliding", "chunked"]), st.integers(1, 11)),
)


def compute(kv, seq, end, start=None):
    """Admits or extends `seq` and lets the step that fills [.., end) be dispatched."""
    updates = []
    if not seq.tables:
        seq.slot = 0
        assert kv.admit(seq, kv.match(seq) if start is None else start, end, updates)
    else:
        assert kv.extend(seq, end, updates)
    seq.num_computed = end
    return updates


def cached_run(kv, tokens, **fields):
    """A sequence that computes all its tokens at once and goes; its filled pages stay cached."""
    seq = PagedTokens(tokens=list(tokens), **fields)
    compute(kv, seq, len(tokens))
    kv.release(seq)
    return seq


def test_a_cached_prefix_ends_at_a_page_and_before_the_last_token():
    kv = KVManager(20, 4)
    cached_run(kv, range(12))
    for length, hit in [(12, 8), (13, 12), (11, 8), (9, 8), (8, 4), (4, 0)]:
        assert kv.match(PagedTokens(tokens=list(range(length)))) == hit
    assert kv.match(PagedTokens(tokens=[0, 1, 2, 3, 9, 5, 6, 7, 8])) == 4
    assert kv.match(PagedTokens(tokens=[9, *range(1, 12)])) == 0


def test_tenants_adapters_and_unwilling_readers_share_nothing():
    kv = KVManager(20, 4)
    cached_run(kv, range(8), salt=b"a")
    assert kv.match(PagedTokens(tokens=list(range(8)), salt=b"a")) == 4
    assert kv.match(PagedTokens(tokens=list(range(8)))) == 0
    assert kv.match(PagedTokens(tokens=list(range(8)), salt=b"b")) == 0
    assert kv.match(PagedTokens(tokens=list(range(8)), salt=b"a", extra=b"lora")) == 0
    assert kv.match(PagedTokens(tokens=list(range(8)), salt=b"a", read_cache=False)) == 0


def test_without_prefix_caching_nothing_is_kept():
    kv = KVManager(20, 4, prefix_caching=False)
    seq = cached_run(kv, range(12))
    assert kv.match(PagedTokens(tokens=list(range(12)))) == 0
    assert kv.pool.num_free == kv.pool.total
    assert not seq.digests


def test_shared_pages_are_the_same_pages():
    kv = KVManager(20, 4)
    one = PagedTokens(tokens=list(range(9)))
    compute(kv, one, 9)
    kv.publish(one)
    two = PagedTokens(tokens=list(range(9)))
    updates = compute(kv, two, 9)
    assert two.tables[0][:2] == one.tables[0][:2]
    assert two.tables[0][2] != one.tables[0][2]
    assert updates == [(0, 0, i, page) for i, page in enumerate(two.tables[0])]
    kv.check_integrity([one, two])
    kv.release(one)
    kv.check_integrity([two])


def test_only_filled_pages_of_known_tokens_are_published():
    kv = KVManager(20, 4)
    seq = PagedTokens(tokens=list(range(8)))
    seq.slot = 0
    assert kv.admit(seq, 0, 8, [])
    kv.publish(seq)
    assert not kv.cache.keys  # pages taken, nothing dispatched
    seq.num_computed = 7
    kv.publish(seq)
    assert len(kv.cache.keys) == 1
    seq.num_computed = 12  # four more sampled, their tokens still on the device
    assert kv.extend(seq, 12, [])
    assert len(kv.cache.keys) == 2
    seq.tokens += [8, 9, 10]
    kv.publish(seq)
    assert len(kv.cache.keys) == 2
    seq.tokens.append(11)
    kv.publish(seq)
    assert len(kv.cache.keys) == 3


def test_a_block_computed_twice_is_listed_once():
    kv = KVManager(20, 4)
    one, two = PagedTokens(tokens=list(range(8))), PagedTokens(tokens=list(range(8)))
    compute(kv, one, 8)
    compute(kv, two, 8)
    kv.publish(one)
    kv.publish(two)
    assert list(kv.cache.keys) == one.tables[0]
    kv.release(one)
    kv.release(two)
    kv.check_integrity([])
    assert len(kv.cache.idle) == 2
    assert kv.pool.available == kv.pool.total


def test_later_blocks_are_evicted_before_earlier_ones():
    kv = KVManager(7, 2)
    cached_run(kv, range(8))
    other = PagedTokens(tokens=[9] * 7)
    compute(kv, other, 7)  # takes two free pages and evicts two
    assert kv.match(PagedTokens(tokens=list(range(9)))) == 4


def test_the_least_recently_used_prefix_is_evicted_first():
    kv = KVManager(7, 2)
    cached_run(kv, [1, 1, 1, 1])
    cached_run(kv, [2, 2, 2, 2])
    cached_run(kv, [1, 1, 1, 1, 1])  # its third page is partial, so it goes back free
    compute(kv, PagedTokens(tokens=[3] * 8), 8)
    assert kv.match(PagedTokens(tokens=[1] * 5)) == 4
    assert kv.match(PagedTokens(tokens=[2] * 5)) == 0


@pytest.mark.parametrize(
    ("group", "held"),
    [  # which table entries are held when the query at position 4, 8, 12, ... is next
        (PageGroup(), [{0, 1}, {0, 1, 2}, {0, 1, 2, 3}]),
        (PageGroup("sliding", 4), [{0, 1}, {1, 2}, {2, 3}]),
        (PageGroup("sliding", 5), [{0, 1}, {1, 2}, {2, 3}]),
        (PageGroup("sliding", 6), [{0, 1}, {0, 1, 2}, {1, 2, 3}]),
        (PageGroup("sliding", 1), [{1}, {2}, {3}]),
        (PageGroup("chunked", 8), [{0, 1}, {2}, {2, 3}]),
        (PageGroup("chunked", 6), [{0, 1}, {1, 2}, {3}]),
        (PageGroup("chunked", 4), [{1}, {2}, {3}]),
    ],
)
def test_pages_out_of_sight_are_given_back(group, held):
    kv = KVManager(20, 4, (group,))
    seq = PagedTokens(tokens=list(range(20)))
    compute(kv, seq, 4, start=0)
    for position, entries in zip((4, 8, 12), held, strict=True):
        updates = compute(kv, seq, position + 1)
        assert {i for i, page in enumerate(seq.tables[0]) if page} == entries
        zeroed = [(0, 0, i, 0) for _, _, i, page in updates if page == 0]
        assert [u for u in updates if u[3] == 0] == zeroed
        kv.check_integrity([seq])
        compute(kv, seq, position + 4)
    assert kv.pool.total - kv.pool.available == len([p for p in seq.tables[0] if p])


@given(
    groups=st.lists(GROUP, min_size=1, max_size=3),
    page_size=st.integers(1, 5),
    length=st.integers(1, 30),
    data=st.data(),
)
def test_match_is_the_longest_prefix_that_every_group_can_continue(groups, page_size, length, data):
    kv = KVManager(200, page_size, tuple(groups))
    first = PagedTokens(tokens=list(range(length + page_size)))
    compute(kv, first, len(first.tokens), start=0)
    kv.release(first)
    forget = data.draw(st.sets(st.sampled_from(sorted(kv.cache.keys))))
    seq = PagedTokens(tokens=list(range(length)))
    kv.match(seq)
    cached = [
        [digest in pages and pages[digest] not in forget for digest in seq.digests]
        for pages in kv.cache.pages
    ]
    for page in forget:
        kv.cache.idle.move_to_end(page, last=False)
    for _ in forget:
        kv.pool._free.append(kv.cache.evict())

    def usable(blocks):
        return all(
            cached[g][position // page_size]
            for g, group in enumerate(groups)
            for position in range(group.first_visible(blocks * page_size), blocks * page_size)
        )

    longest = max(blocks for blocks in range((length - 1) // page_size + 1) if usable(blocks))
    assert kv.match(seq) == longest * page_size
    compute(kv, seq, length)
    kv.check_integrity([seq])


def test_where_no_group_looks_back_nothing_need_be_cached():
    kv = KVManager(30, 2, (PageGroup("chunked", 4),))
    assert kv.match(PagedTokens(tokens=list(range(11)))) == 8
    assert KVManager(30, 2, (PageGroup("chunked", 4), PageGroup())).match(PagedTokens(tokens=[0] * 11)) == 0


def test_a_windowed_group_needs_only_what_its_next_query_sees():
    kv = KVManager(30, 2, (PageGroup(), PageGroup("sliding", 4)))
    seq = PagedTokens(tokens=list(range(13)))
    for end in (4, 8, 12, 13):
        compute(kv, seq, end)
    kv.release(seq)
    window = kv.cache.pages[1]
    for index in (0, 1, 2):  # long out of sight at position 12
        kv.cache.idle.move_to_end(window[seq.digests[index]], last=False)
    for _ in range(3):
        kv.pool._free.append(kv.cache.evict())
    again = PagedTokens(tokens=list(range(13)))
    updates = compute(kv, again, 13)
    assert again.tables[1][:4] == [0, 0, 0, 0]
    assert all(again.tables[1][4:])
    assert all(again.tables[0])
    assert len(updates) == 14  # the zeros too: the slot may hold another sequence's old entries


def test_admission_counts_the_cached_pages_it_revives():
    kv = KVManager(5, 2)
    cached_run(kv, range(4))
    blocker = PagedTokens(tokens=[9])
    compute(kv, blocker, 1)
    seq = PagedTokens(tokens=list(range(8)))
    seq.slot = 1
    updates = []
    assert kv.match(seq) == 4  # 1 free + 2 cached, and 4 are needed
    assert not kv.admit(seq, 4, 8, updates)
    assert kv.admit(seq, 4, 6, updates, reserve=0)
    assert len(updates) == 3
    kv.release(seq)
    assert not kv.admit(seq, kv.match(seq), 6, [], reserve=1)
    assert not seq.tables
    kv.check_integrity([blocker])


def test_a_refused_extension_takes_nothing():
    kv = KVManager(4, 2, (PageGroup(), PageGroup()))
    seq = PagedTokens(tokens=list(range(6)))
    compute(kv, seq, 2)
    updates = []
    assert not kv.extend(seq, 3, updates)  # two groups need a page each, one is left
    assert not updates
    assert kv.pool.available == 1
    kv.check_integrity([seq])


@given(
    groups=st.lists(GROUP, min_size=1, max_size=3),
    page_size=st.integers(1, 5),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_pages_alone_bounds_what_one_sequence_holds(groups, page_size, chunks):
    kv = KVManager(500, page_size, tuple(groups))
    bound = kv.pages_alone(sum(chunks), max(chunks))
    seq = PagedTokens(tokens=[0] * sum(chunks))
    for end in itertools.accumulate(chunks):
        compute(kv, seq, end, start=0)
        assert sum(page > 0 for table in seq.tables for page in table) <= bound


def test_pages_alone_is_reached():
    assert KVManager(2, 4).pages_alone(9, 3) == 3
    assert KVManager(2, 4, (PageGroup("sliding", 6),)).pages_alone(100, 1) == 3
    assert KVManager(2, 4, (PageGroup("sliding", 5), PageGroup())).pages_alone(100, 1) == 2 + 25


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda one, two: one.tables[0].append(one.tables[0][0]), "twice"),
        (lambda one, two: two.tables[0].__setitem__(2, one.tables[0][2]), "disagree"),
        (lambda one, two: one.tables[0].pop(), "tokens, but tables"),
        (lambda one, two: one.tables[0].reverse(), "another block"),
        (lambda one, two: one.tables[0].__setitem__(0, 0), "disagree"),
    ],
)
def test_integrity_check_sees_damage(damage, message):
    kv = KVManager(20, 2)
    one, two = PagedTokens(tokens=[0, 1, 2, 3, 4]), PagedTokens(tokens=[0, 1, 2, 3, 5])
    for seq in (one, two):
        compute(kv, seq, 5)
        kv.publish(seq)
    kv.check_integrity([one, two])
    damage(one, two)
    with pytest.raises(RuntimeError, match=message):
        kv.check_integrity([one, two])


def test_a_page_shared_behind_the_prefix_cache_is_seen():
    kv = KVManager(20, 2)
    one, two = PagedTokens(tokens=[0]), PagedTokens(tokens=[1])
    compute(kv, one, 1)
    compute(kv, two, 1)
    kv.pool.drop(two.tables[0][0])
    two.tables[0][0] = one.tables[0][0]
    kv.pool.refs[one.tables[0][0]] += 1
    with pytest.raises(RuntimeError, match="not through the prefix cache"):
        kv.check_integrity([one, two])
