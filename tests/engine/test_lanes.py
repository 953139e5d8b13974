"""Sequences in lanes, each with pages of its own: who goes where, and where a step's arrays have them."""

from __future__ import annotations

import itertools

import numpy as np

from jaxinfer.config.engine import EngineConfig
from jaxinfer.engine.batch import BatchBuilder
from jaxinfer.engine.buckets import BucketTable
from jaxinfer.engine.layout import ForwardLayout
from jaxinfer.engine.request import SamplingParams
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import Sequence, Step
from jaxinfer.kv.manager import KVManager

PAGE, BLOCK, LANES = 4, 8, 2
CONFIG = EngineConfig(
    max_model_len=64, max_num_seqs=6, max_prefill_tokens=32, prefill_block=BLOCK, page_size=PAGE
)
_ids = itertools.count()


def sequence(tokens: list[int], new: int = 10, **fields) -> Sequence:
    return Sequence(
        seq_id=next(_ids), tokens=list(tokens), num_prompt=len(tokens), max_total=len(tokens) + new, **fields
    )


def scheduler(pages: int = 40) -> Scheduler:
    table = BucketTable(CONFIG, lanes=LANES)
    return Scheduler(
        [KVManager(pages + 1, PAGE) for _ in range(LANES)],
        max_num_seqs=CONFIG.max_num_seqs,
        max_prefill_tokens=table.lane_blocks * BLOCK,
        max_lane_seqs=table.lane_rows,
        prefill_block=BLOCK,
    )


def run(sched: Scheduler) -> Step:
    """A step whose tokens are read at once."""
    step = sched.schedule()
    assert step is not None
    sched.check_integrity()
    for seq in [*step.decode, *(chunk.seq for chunk in step.prefill if chunk.samples)]:
        sched.append_token(seq, 7)
    return step


def test_the_lane_is_the_one_with_the_longest_cached_prefix_then_with_most_pages():
    sched = scheduler()
    first, second = sequence([1] * 12), sequence([2] * 8)
    for seq in (first, second):
        sched.add(seq)
    run(sched)
    assert (first.lane, second.lane) == (0, 1)
    run(sched)  # what the first step filled is listed now
    again, fresh = sequence([1] * 12), sequence([3] * 5)
    for seq in (again, fresh):
        sched.add(seq)
    run(sched)
    assert (again.lane, again.cached_tokens) == (0, 8)
    assert again.tables[0][:2] == first.tables[0][:2]
    assert fresh.lane == 1  # which has more pages left


def test_a_lane_takes_its_share_of_sequences_and_of_prompts_tokens():
    sched = scheduler()
    seqs = [sequence([1] * 9) for _ in range(8)]  # all would go where the first has been
    for seq in seqs:
        sched.add(seq)
    step = run(sched)
    assert [chunk.seq.lane for chunk in step.prefill] == [0, 1]  # 16 tokens of each lane, two blocks a prompt
    for _ in range(4):
        run(sched)
    running = [seq.lane for seq in (*sched.decoding, *sched.prefilling)]
    assert [running.count(lane) for lane in range(LANES)] == [3, 3]
    assert len(sched.waiting) == 2


def test_whoever_needs_a_page_takes_it_from_its_own_lane():
    sched = scheduler(pages=7)
    best, other, worst = sequence([1] * 8, 20), sequence([2] * 15, 8), sequence([3] * 8, 20)
    for seq in (best, other, worst):
        sched.add(seq)
        run(sched)
    assert [seq.lane for seq in (best, other, worst)] == [0, 1, 0]
    while not sched.num_preemptions:
        run(sched)
    assert worst.num_preemptions == 1
    assert (best.num_preemptions, other.num_preemptions) == (0, 0)
    assert other.tables
    # A newcomer of the other lane is not what makes room in this one.
    assert len(best.tables[0]) + len(worst.tables[0] if worst.tables else ()) <= 7


def test_each_lane_has_an_equal_part_of_rows_and_blocks():
    table = BucketTable(CONFIG, lanes=LANES)
    assert all(bucket.decode % LANES == bucket.blocks % LANES == 0 for bucket in table.all())
    builder = BatchBuilder(table, num_slots=CONFIG.max_num_seqs + 1, groups=1, table_width=16)
    sched = scheduler()
    decoding = [sequence([i] * 5) for i in (1, 2, 3)]
    for seq in decoding:
        sched.add(seq)
    builder.build(run(sched))
    builder.build(run(sched))
    prompts = [sequence([8] * 11), sequence([9] * 3)]
    for seq in prompts:
        sched.add(seq)
    for seq in (*decoding, *prompts):
        builder.set_row(max(seq.slot, 0), SamplingParams(), 0, full=False)
    step = sched.schedule()
    assert step is not None
    assert {chunk.seq.lane for chunk in step.prefill} == {0, 1}
    arrays = builder.build(step)
    bucket = arrays.bucket
    tokens, positions, kv_lens, samples, tables = ForwardLayout(bucket, 1, 16).views(arrays.ints)
    token_rows = bucket.decode + np.arange(bucket.blocks * BLOCK)
    lane_of_token = np.concatenate(
        [
            np.arange(bucket.decode) * LANES // bucket.decode,
            (token_rows - bucket.decode) * LANES // (bucket.blocks * BLOCK),
        ]
    )
    for row, seq in enumerate(arrays.sampled):
        place = samples[row]
        assert lane_of_token[place] == seq.lane
        assert positions[place] == seq.num_computed - 1
        if place < bucket.decode:
            assert tokens[place] == seq.tokens[-1]
            assert kv_lens[place] == seq.num_computed
            held = seq.tables[0]
            assert tables[0, place, : len(held)].tolist() == held
    for chunk, start in zip(step.prefill, arrays.chunk_starts, strict=True):
        assert lane_of_token[start] == chunk.seq.lane
        assert tokens[start : start + chunk.length].tolist() == chunk.seq.tokens[: chunk.length]
        row = bucket.decode + (start - bucket.decode) // BLOCK
        assert tables[0, row, : len(chunk.seq.tables[0])].tolist() == chunk.seq.tables[0]
    live = kv_lens > 0
    assert live.sum() == len(step.decode) + sum(-(-chunk.length // BLOCK) for chunk in step.prefill)
