import pytest

from jaxinfer.kv.prefix import BlockHasher, PrefixCache, root_digest


def digests(tokens, count, salt=b"", extra=b""):
    out = []
    BlockHasher(2).extend(out, tokens, count, root_digest(salt, extra))
    return out


def test_a_digest_names_the_block_and_all_before_it():
    base = digests([1, 2, 3, 4], 2)
    assert digests([1, 2, 3, 4, 5], 2) == base
    assert digests([9, 2, 3, 4], 2)[1] != base[1]
    assert digests([1, 2, 3, 5], 2)[0] == base[0]
    assert digests([1, 2, 3, 5], 2)[1] != base[1]


def test_salt_and_extra_separate_and_cannot_be_confused():
    roots = [root_digest(b"", b""), root_digest(b"ab", b""), root_digest(b"a", b"b"), root_digest(b"", b"ab")]
    assert len(set(roots)) == 4
    assert digests([1, 2], 1, salt=b"x") != digests([1, 2], 1)


def test_digests_grow_without_rehashing_what_is_there():
    hasher, root = BlockHasher(2), root_digest(b"", b"")
    grown: list[bytes] = []
    hasher.extend(grown, [1, 2, 3], 1, root)
    first = grown[0]
    hasher.extend(grown, [-1, -1, 3, 4, 5, 6], 3, root)  # earlier tokens are not looked at again
    assert grown[0] is first
    assert grown == digests([1, 2, 3, 4, 5, 6], 3)


def test_the_first_page_of_a_block_stays_listed():
    cache = PrefixCache(2)
    cache.publish(0, b"d", 5)
    cache.publish(0, b"d", 6)
    cache.publish(1, b"d", 7)  # another group holds other layers of the same block
    assert cache.pages == [{b"d": 5}, {b"d": 7}]
    assert cache.keys == {5: (0, b"d"), 7: (1, b"d")}
    cache.check_integrity()


def test_eviction_takes_the_page_that_is_idle_longest():
    cache = PrefixCache(1)
    for page in (1, 2, 3):
        cache.publish(0, bytes([page]), page)
        cache.idle[page] = None
    del cache.idle[1]  # used again, then idle again
    cache.idle[1] = None
    assert [cache.evict(), cache.evict(), cache.evict()] == [2, 3, 1]
    assert cache.pages == [{}]
    assert not cache.keys


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: cache.keys.clear(),
        lambda cache: cache.pages[0].clear(),
        lambda cache: cache.pages[0].update({b"e": 5}),
        lambda cache: cache.idle.update({9: None}),
    ],
)
def test_integrity_check_sees_damage(damage):
    cache = PrefixCache(1)
    cache.publish(0, b"d", 5)
    cache.check_integrity()
    damage(cache)
    with pytest.raises(RuntimeError, match="prefix cache"):
        cache.check_integrity()
