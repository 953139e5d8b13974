import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.errors import ConfigError
from jaxinfer.kv.pages import PageGroup, PagePool, place_layers
from jaxinfer.kv.prefix import PrefixCache


@pytest.mark.parametrize(
    ("group", "position", "first"),
    [
        (PageGroup(), 100, 0),
        (PageGroup("sliding", 4), 2, 0),
        (PageGroup("sliding", 4), 3, 0),
        (PageGroup("sliding", 4), 4, 1),
        (PageGroup("sliding", 1), 7, 7),
        (PageGroup("chunked", 4), 3, 0),
        (PageGroup("chunked", 4), 4, 4),
        (PageGroup("chunked", 4), 7, 4),
    ],
)
def test_first_visible_position(group, position, first):
    assert group.first_visible(position) == first


@given(st.sampled_from(["sliding", "chunked"]), st.integers(1, 9), st.integers(0, 50))
def test_look_back_never_moves_backwards(kind, span, position):
    group = PageGroup(kind, span)
    assert group.first_visible(position) <= group.first_visible(position + 1) <= position + 1
    assert position - group.first_visible(position) < span


@pytest.mark.parametrize(("kind", "span"), [("full", 4), ("sliding", 0), ("chunked", -1)])
def test_groups_that_make_no_sense(kind, span):
    with pytest.raises(ConfigError, match="span"):
        PageGroup(kind, span)


FULL, SLIDING, CHUNKED = PageGroup(), PageGroup("sliding", 8), PageGroup("chunked", 16)


@pytest.mark.parametrize(
    ("looks", "groups", "arrays"),
    [
        ([FULL] * 5, [FULL], 5),
        ([SLIDING] * 3, [SLIDING], 3),
        ([CHUNKED, CHUNKED, CHUNKED, FULL] * 12, [CHUNKED] * 3 + [FULL], 12),  # Llama 4
        (([SLIDING] * 5 + [FULL]) * 10 + [SLIDING] * 2, [SLIDING] * 6 + [FULL], 10),  # Gemma 3 27B
        ([FULL, FULL, FULL, SLIDING], [FULL, SLIDING], 3),
    ],
)
def test_layers_share_arrays_and_full_ones_waste_none(looks, groups, arrays):
    found, places = place_layers(looks)
    assert sorted(found, key=str) == sorted(groups, key=str)
    assert 1 + max(place.array for place in places) == arrays
    assert len({(place.group, place.array) for place in places}) == len(looks)
    assert [found[place.group] for place in places] == [place.look for place in places] == looks
    full = [place for place in places if place.look == FULL]
    assert len(full) in (0, arrays)


@pytest.mark.parametrize(
    ("looks", "bounds", "groups", "arrays"),
    [
        ([FULL] * 5, (0, 3, 5), [FULL], [3, 2]),
        ([CHUNKED, CHUNKED, CHUNKED, FULL] * 12, (0, 24, 48), [CHUNKED] * 3 + [FULL], [6, 6]),  # Llama 4
        ([CHUNKED, CHUNKED, CHUNKED, FULL], (0, 2, 4), [CHUNKED, FULL], [2, 1]),
        # The second stage's five windows fill as many groups, so that the first one's need one array.
        ([SLIDING] * 10 + [FULL], (0, 5, 11), [SLIDING] * 5 + [FULL], [1, 1]),
        ([FULL, SLIDING], (0, 1, 2), [FULL, SLIDING], [1, 1]),
    ],
)
def test_stages_share_groups_and_have_arrays_of_their_own(looks, bounds, groups, arrays):
    found, places = place_layers(looks, bounds)
    assert sorted(found, key=str) == sorted(groups, key=str)
    assert [found[place.group] for place in places] == [place.look for place in places] == looks
    for start, end, count in zip(bounds[:-1], bounds[1:], arrays, strict=True):
        own = places[start:end]
        assert 1 + max(place.array for place in own) == count
        assert len({(place.group, place.array) for place in own}) == len(own)


def test_the_dump_page_is_never_handed_out():
    pool = PagePool(4, PrefixCache(1))
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]
    assert pool.available == 0
    with pytest.raises(ConfigError, match="num_pages"):
        PagePool(1, PrefixCache(1))


def test_a_page_is_free_again_only_when_its_last_holder_drops_it():
    cache = PrefixCache(1)
    pool = PagePool(3, cache)
    page = pool.take()
    cache.publish(0, b"d", page)
    pool.share(page)
    pool.drop(page)
    assert pool.available == 1
    pool.drop(page)
    assert pool.available == 2
    assert pool.num_free == 1
    pool.share(page)  # from the cache back into use
    assert pool.available == 1
    pool.check_integrity([int(p == page) for p in range(3)])


def test_free_pages_are_taken_before_cached_ones():
    cache = PrefixCache(1)
    pool = PagePool(4, cache)
    kept, other = pool.take(), pool.take()
    cache.publish(0, b"d", kept)
    pool.drop(kept)
    pool.drop(other)
    assert {pool.take(), pool.take()}.isdisjoint({kept})
    assert pool.take() == kept
    assert cache.pages == [{}]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool, page: pool.refs.__setitem__(page, 2), "disagree"),
        (lambda pool, page: pool._free.pop(), "are not the 4 pages"),
        (lambda pool, page: pool._free.append(page), "are not the 4 pages"),
        (lambda pool, page: pool._free.append(0), "are not the 4 pages"),
        (lambda pool, page: pool._cache.publish(0, b"d", pool._free[0]), "free pages"),
    ],
)
def test_integrity_check_sees_damage(damage, message):
    pool = PagePool(5, PrefixCache(1))
    page = pool.take()
    holders = [int(p == page) for p in range(5)]
    pool.check_integrity(holders)
    damage(pool, page)
    with pytest.raises(RuntimeError, match=message):
        pool.check_integrity(holders)
