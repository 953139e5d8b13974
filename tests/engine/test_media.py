"""Rows of the media buffer: who holds them, and which prompts wait for them."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.media import MediaRows, PromptMedia, place_media
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import Sequence
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.kv.manager import KVManager
from jaxinfer.media.item import MediaItem

IMAGE = 9


def item(rows: int, name: bytes = b"a") -> MediaItem:
    return MediaItem(np.zeros(1, np.float32), rows, name)


def prompt(*lengths: int) -> list[int]:
    """Images of so many placeholders, two words before each and three at the end."""
    return [t for n in lengths for t in (1, 2, *[IMAGE] * n)] + [3, 4, 5]


def test_placeholders_are_found_and_counted():
    media = place_media(prompt(2, 3), IMAGE, [item(2), item(3)])
    assert media.positions == [2, 3, 6, 7, 8]
    for items in ([item(2)], [item(2), item(4)], [item(5), item(1)]):
        with pytest.raises(ValueError, match=r"has 5 image placeholders .token 9., its images need"):
            place_media(prompt(2, 3), IMAGE, items)


def test_the_digest_tells_items_and_their_borders_apart():
    def digest(*names: bytes) -> bytes:
        return PromptMedia(tuple(item(1, n) for n in names), [], []).digest

    seen = [
        digest(b"a"),
        digest(b"b"),
        digest(b"a", b"b"),
        digest(b"b", b"a"),
        digest(b"ab"),
        digest(b"a", b"a"),
    ]
    assert len(set(seen)) == len(seen)
    assert digest(b"a", b"b") == seen[2]


def test_only_items_that_are_still_computed_are_encoded():
    media = place_media(prompt(2, 3), IMAGE, [item(2), item(3)])
    media.rows = [10, 11, 12, 13, 14]
    assert [rows for _, rows in media.needed(0)] == [[10, 11], [12, 13, 14]]
    assert [rows for _, rows in media.needed(3)] == [[10, 11], [12, 13, 14]]
    assert [rows for _, rows in media.needed(4)] == [[12, 13, 14]]
    assert media.needed(9) == []


def test_rows_are_all_or_nothing_and_come_back():
    pool = MediaRows(4)
    first, second = (place_media(prompt(n), IMAGE, [item(n)]) for n in (3, 2))
    assert pool.take(first)
    assert not pool.take(second)
    assert (pool.available, second.rows) == (1, [])
    pool.give(first)
    pool.give(first)
    assert pool.available == 4
    assert pool.take(second)
    assert len(set(second.rows)) == 2
    with pytest.raises(ConfigError, match="max_media_tokens"):
        MediaRows(0)


def scheduler(rows: int, pages: int = 40) -> tuple[Scheduler, MediaRows]:
    pool = MediaRows(rows)
    kv = KVManager(pages, 4)
    return Scheduler(kv, max_num_seqs=4, max_prefill_tokens=8, prefill_block=4, media_rows=pool), pool


def with_images(seq_id: int, *lengths: int, read_cache: bool = True) -> Sequence:
    tokens = prompt(*lengths)
    media = place_media(tokens, IMAGE, [item(n, b"%d" % n) for n in lengths])
    return Sequence(
        seq_id=seq_id, tokens=tokens, num_prompt=len(tokens), max_total=len(tokens) + 4,
        media=media, extra=media.digest, read_cache=read_cache,
    )  # fmt: skip


def run(policy: Scheduler) -> None:
    """Steps, each token read at once, until nothing can run."""
    while (step := policy.schedule()) is not None:
        for seq in [*step.decode, *(chunk.seq for chunk in step.prefill if chunk.samples)]:
            policy.append_token(seq, 7)
            if len(seq.tokens) == seq.max_total:
                policy.finish(seq)


def test_rows_are_held_while_the_prompt_is_computed():
    policy, pool = scheduler(12)
    seq = with_images(1, 10)  # 15 tokens: two steps
    policy.add(seq)
    assert policy.schedule() is not None
    assert pool.available == 2
    assert policy.schedule() is not None
    assert pool.available == 2  # the second step is only about to be dispatched
    policy.append_token(seq, 7)
    assert policy.schedule() is not None
    assert (pool.available, seq.media and seq.media.rows) == (12, [])
    policy.finish(seq)
    assert pool.available == 12


def test_a_prompt_waits_for_rows_and_nobody_is_lost():
    policy, pool = scheduler(12)
    first, second = with_images(1, 10), with_images(2, 8)
    policy.add(first)
    policy.add(second)
    policy.schedule()
    policy.schedule()
    assert policy.waiting == [second]
    policy.append_token(first, 7)
    policy.schedule()  # the first one's prompt is computed and dispatched: its rows are free
    assert second in policy.prefilling
    policy.append_token(first, 7)
    run(policy)
    policy.check_integrity()
    assert (pool.available, policy.has_work) == (12, False)


def test_aborted_while_it_holds_rows():
    policy, pool = scheduler(12)
    seq = with_images(1, 10)
    policy.add(seq)
    policy.schedule()
    policy.abort(seq)
    assert pool.available == 12


def test_images_that_are_cached_take_no_rows():
    policy, pool = scheduler(12)
    policy.add(with_images(1, 10))
    run(policy)
    again = with_images(2, 10)
    policy.add(again)
    policy.schedule()
    assert again.cached_tokens == 12  # all placeholders: positions 2 to 11
    assert pool.available == 12
    other = with_images(3, 10)
    other.extra = b"another image"
    policy.add(other)
    policy.schedule()
    assert (other.cached_tokens, pool.available) == (0, 2)


def test_more_images_than_there_are_rows():
    policy, _ = scheduler(12)
    with pytest.raises(RequestError, match="take 13 tokens, the most allowed is 12"):
        policy.add(with_images(1, 10, 3))
