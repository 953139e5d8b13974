"""Steps in parts: all of the work, in its order, in shapes that the programs have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config.engine import EngineConfig
from jaxinfer.engine.buckets import BucketTable
from jaxinfer.engine.microbatch import split_step
from jaxinfer.engine.sequence import PrefillChunk, Sequence, Step

BLOCK, SEQS, BLOCKS = 4, 13, 7


def sequence(index: int) -> Sequence:
    return Sequence(seq_id=index, tokens=[1], num_prompt=1, max_total=100)


# Any that a scheduler of 13 sequences and 28 prefill tokens may give: rows, and (first block, tokens) of each chunk.
PLANS = st.tuples(
    st.integers(0, SEQS),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, BLOCKS * BLOCK)), max_size=BLOCKS),
)


def step_of(plan: tuple[int, list[tuple[int, int]]]) -> Step:
    rows, wanted = plan
    chunks, room = [], BLOCKS
    for first, tokens in wanted[: SEQS - rows]:
        length = min(tokens, room * BLOCK)
        if length:
            chunks.append(
                PrefillChunk(
                    sequence(100 + len(chunks)), BLOCK * first, length, length < tokens or tokens % 3 > 0
                )
            )
            room -= -(-length // BLOCK)
    return Step(decode=[sequence(i) for i in range(rows)], prefill=chunks, table_updates=[(0, 0, 0, 1)])


@given(PLANS, st.integers(1, 8))
def test_parts_are_the_whole(plan, most: int):
    step = step_of(plan)
    parts = split_step(step, most, BLOCK)
    blocks = [sum(-(-chunk.length // BLOCK) for chunk in part.prefill) for part in parts]
    rows = [len(part.decode) for part in parts]
    assert len(parts) == max(1, min(most, max(len(step.decode), sum(blocks))))
    assert [seq for part in parts for seq in part.decode] == step.decode
    assert max(rows) - min(rows) <= 1
    assert max(blocks) - min(blocks) <= 1
    assert [update for part in parts for update in part.table_updates] == step.table_updates
    assert parts[0].table_updates == step.table_updates
    # Joined again, the chunks are those of the step; all but a chunk's last part are whole blocks.
    joined: list[PrefillChunk] = []
    for seq, start, length, samples in (chunk for part in parts for chunk in part.prefill):
        if joined and joined[-1].seq is seq:
            before = joined.pop()
            assert not before.samples
            assert before.length % BLOCK == 0
            assert before.start + before.length == start
            start, length = before.start, before.length + length
        joined.append(PrefillChunk(seq, start, length, samples))
    assert joined == step.prefill


@given(PLANS, st.integers(1, 8), st.sampled_from([2, 8]))
def test_parts_fit_the_shapes_of_microbatches(plan, most: int, min_rows: int):
    config = EngineConfig(
        max_model_len=100,
        max_num_seqs=SEQS,
        max_prefill_tokens=BLOCKS * BLOCK,
        prefill_block=BLOCK,
        page_size=4,
    )
    buckets = BucketTable(config, min_rows=min_rows, microbatches=most)
    known = buckets.all()
    assert len(known) <= len(BucketTable(config, min_rows=min_rows).all())
    for part in split_step(step_of(plan), most, BLOCK):
        blocks = sum(-(-chunk.length // BLOCK) for chunk in part.prefill)
        bucket = buckets.fit(len(part.decode), blocks)
        assert bucket in known
        assert bucket.decode >= len(part.decode)
        assert bucket.blocks >= blocks
        assert bucket.samples >= len(part.decode) + sum(chunk.samples for chunk in part.prefill)
