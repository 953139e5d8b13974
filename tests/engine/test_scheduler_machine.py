"""Random traffic against a model of the device: every query must find the right KV wherever it looks.

The model device keeps, for each page slot, what was last written there (group, tenant, whole token history up to the
position), applies table updates by slot as the engine does, and generates a token that depends on the whole history.
A page shared before it is filled, reused too early, given back too early or shared across tenants is a wrong read.
"""

from __future__ import annotations

import zlib
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import Sequence, SequenceStatus, Step
from jaxinfer.errors import OverloadError
from jaxinfer.kv.manager import KVManager
from jaxinfer.kv.pages import PageGroup

EOS = 3
MAX_TOTAL = 29
MAX_WAITING = 12


def next_token(history: list[int]) -> int:
    value = zlib.crc32(bytes(history)) % 24
    return EOS if value == 0 else value % 3


def cold_run(prompt: list[int], max_total: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < max_total:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens


class ModelDevice:
    def __init__(self, groups: tuple[PageGroup, ...], page_size: int):
        self.groups = groups
        self.page_size = page_size
        self.memory: dict[tuple[int, int, int], tuple] = {}  # (page, offset, lane) -> content
        self.tables: dict[tuple[int, int, int], int] = {}  # (slot, group, index) -> page
        self.history: dict[int, list[int]] = {}  # slot -> tokens, the sampled one included

    def run(self, step: Step) -> list[tuple[Sequence, int]]:
        """Executes a step and returns (sequence, sampled token) pairs."""
        for slot, group, index, page in step.table_updates:
            self.tables[slot, group, index] = page
        rows = []
        for seq in step.decode:
            position = seq.num_computed - 1
            assert len(self.history[seq.slot]) == position + 1, "the token to compute was never sampled"
            assert self.history[seq.slot][: len(seq.tokens)] == seq.tokens[: position + 1]
            rows.append((seq, position, 1, True))
        for seq, start, length, samples in step.prefill:
            assert samples == (start + length == len(seq.tokens))
            self.history[seq.slot] = seq.tokens[: start + length]
            rows.append((seq, start, length, samples))
        for seq, _, _, _ in rows:
            for group, table in enumerate(seq.tables):
                mirror = [self.tables[seq.slot, group, index] for index in range(len(table))]
                assert mirror == table, "the engine's copy of a table is stale"
        for seq, start, _, _ in rows:  # what earlier steps wrote must be there before this one writes
            self._check_reads(seq, start, start - 1)
        for seq, start, length, _ in rows:
            for position in range(start, start + length):
                for group in range(len(self.groups)):
                    slot = self._page_slot(seq, group, position)
                    assert slot[0] != 0, "a token was written to the dump page"
                    self.memory[slot] = self._content(seq, group, position)
        for (
            seq,
            start,
            length,
            _,
        ) in rows:  # and still be there, and the row's own, when the attention of this step reads
            for position in range(start, start + length):
                self._check_reads(seq, position, position)
        sampled = []
        for seq, _, _, samples in rows:
            if samples:
                history = self.history[seq.slot]
                history.append(next_token(history))
                sampled.append((seq, history[-1]))
        return sampled

    def _check_reads(self, seq: Sequence, query: int, last: int) -> None:
        for group, look_back in enumerate(self.groups):
            for position in range(look_back.first_visible(query), last + 1):
                slot = self._page_slot(seq, group, position)
                found = self.memory.get(slot)
                wanted = self._content(seq, group, position)
                assert slot[0] != 0, f"the query at {query} looks at {position}, whose page is gone"
                assert found == wanted, f"the query at {query} finds {found} at {position}, not {wanted}"

    def _page_slot(self, seq: Sequence, group: int, position: int) -> tuple[int, int, int]:
        page = self.tables[seq.slot, group, position // self.page_size]
        return page, position % self.page_size, seq.lane

    def _content(self, seq: Sequence, group: int, position: int) -> tuple:
        return group, seq.salt, seq.extra, tuple(self.history[seq.slot][: position + 1])


GROUPS = st.lists(
    st.one_of(
        st.just(PageGroup()),
        st.builds(PageGroup, st.sampled_from(["sliding", "chunked"]), st.integers(1, 11)),
    ),
    min_size=1,
    max_size=3,
).map(tuple)
# Few distinct prompts with long common prefixes, so that most requests share pages.
PROMPTS = st.builds(
    lambda base, cut, tail: (base[:cut] + tail) or [1],
    st.sampled_from([[0, 1, 2, 0, 1, 1, 2, 2, 0, 1, 0, 2, 1], [2] * 13]),
    st.integers(0, 13),
    st.lists(st.integers(0, 2), max_size=4),
)

REQUESTS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "new": st.sampled_from([1, 2, 5, 9, 12, 12]),
        "salt": st.sampled_from([b"acme", b"acme", b"acme", b"corp"]),
        "extra": st.sampled_from([b"", b"", b"", b"adapter"]),
        "priority": st.sampled_from([0, 0, 0, 1, -1]),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "read_cache": st.sampled_from([True, True, True, False]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        groups=GROUPS,
        page_size=st.integers(1, 5),
        spare_pages=st.sampled_from([0, 0, 0, 1, 2, 4, 12]),
        max_num_seqs=st.integers(1, 6),
        block=st.integers(1, 3),
        max_prefill_tokens=st.integers(3, 14),
        max_prefill_seqs=st.integers(1, 4),
        lanes=st.sampled_from([1, 1, 2, 3]),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        groups,
        page_size,
        spare_pages,
        max_num_seqs,
        block,
        max_prefill_tokens,
        max_prefill_seqs,
        lanes,
        prefix_caching,
    ):
        alone = KVManager(2, page_size, groups).pages_alone(MAX_TOTAL - 1, max_prefill_tokens)
        self.lanes = [
            KVManager(1 + alone + spare_pages, page_size, groups, prefix_caching=prefix_caching)
            for _ in range(lanes)
        ]
        self.limits = (max_num_seqs, max_prefill_tokens, max_prefill_seqs, block)
        self.scheduler = Scheduler(
            self.lanes,
            max_num_seqs=max_num_seqs,
            max_prefill_tokens=max_prefill_tokens,
            max_prefill_seqs=max_prefill_seqs,
            max_lane_seqs=-(-max_num_seqs // lanes),
            prefill_block=block,
            max_waiting=MAX_WAITING,
        )
        self.device = ModelDevice(groups, page_size)
        self.in_flight: deque[list[tuple[Sequence, int]]] = deque()
        self.live: list[Sequence] = []
        self.expected: dict[int, list[int]] = {}
        self.last_decode: list[Sequence] = []

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, requests):
        for request in requests:
            self.add_request(**request)

    def add_request(self, *, prompt, new, n, **fields):
        leader = None
        for _ in range(n):
            seq = Sequence(
                seq_id=len(self.expected),
                tokens=list(prompt),
                num_prompt=len(prompt),
                max_total=len(prompt) + new,
                leader=leader,
                **fields,
            )
            if len(self.scheduler.waiting) >= MAX_WAITING:
                with pytest.raises(OverloadError):
                    self.scheduler.add(seq)
                return
            self.scheduler.add(seq)
            self.expected[seq.seq_id] = cold_run(prompt, seq.max_total)
            self.live.append(seq)
            leader = leader or seq

    @rule(steps=st.integers(1, 4), depth=st.sampled_from([0, 1, 1, 2, 2, 2]))
    def run(self, steps, depth):
        """Some turns of the engine's loop, reading tokens `depth` steps late."""
        for _ in range(steps):
            self.turn(depth)

    @rule(data=st.data())
    def abort(self, data):
        if not self.live:
            return
        seq = data.draw(st.sampled_from(self.live))
        self.scheduler.abort(seq)
        self.scheduler.abort(seq)  # a client may hang up twice
        self.live.remove(seq)

    def drain(self):
        """Everything ends, and no page stays behind."""
        # Each turn advances the best sequence by a token or a block; recomputation and delay cost a small factor.
        for _ in range(50 + 40 * len(self.live) * MAX_TOTAL):
            if not (self.scheduler.has_work or self.in_flight):
                break
            self.turn(2)
        assert not self.live
        assert not self.scheduler.has_work
        self.scheduler.check_integrity()
        for kv in self.lanes:
            assert kv.pool.available == kv.pool.total
            assert kv.prefix_caching or kv.pool.num_free == kv.pool.total

    @invariant()
    def integrity(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "scheduler"):
            self.drain()

    def turn(self, depth: int) -> None:
        step = self.scheduler.schedule()
        if step is None:
            assert self.in_flight or not self.scheduler.has_work, (
                "nothing runs and nothing is in flight: dead"
            )
            depth = 0
        else:
            self.check_step(step)
            self.in_flight.append(self.device.run(step))
            self.scheduler.check_integrity()
        while len(self.in_flight) > depth:
            self.read(self.in_flight.popleft())

    def read(self, sampled: list[tuple[Sequence, int]]) -> None:
        for seq, token in sampled:
            if not self.scheduler.append_token(seq, token):
                assert seq.status is SequenceStatus.FINISHED
                continue
            assert len(seq.tokens) <= seq.max_total
            if token == EOS or len(seq.tokens) == seq.max_total:
                self.scheduler.finish(seq)
                assert seq.tokens == self.expected[seq.seq_id], "a warm run differs from a cold one"
                self.live.remove(seq)

    def check_step(self, step: Step) -> None:
        max_num_seqs, max_prefill_tokens, max_prefill_seqs, block = self.limits
        chunks = [chunk.seq for chunk in step.prefill]
        rows = [seq.seq_id for seq in [*step.decode, *chunks]]
        assert 0 < len(rows) == len(set(rows)) <= max_num_seqs
        assert all(seq.status is SequenceStatus.RUNNING for seq in [*step.decode, *chunks])
        assert len(chunks) <= max_prefill_seqs
        for lane in range(len(self.lanes)):
            lengths = [length for seq, _, length, _ in step.prefill if seq.lane == lane]
            assert sum(-(-length // block) * block for length in lengths) <= max_prefill_tokens
            rows_in_lane = [seq for seq in [*step.decode, *chunks] if seq.lane == lane]
            assert len(rows_in_lane) <= -(-max_num_seqs // len(self.lanes))
        assert not {seq.seq_id for seq in step.preempted} & set(rows)
        assert all(len(seq.tokens) + seq.num_pending <= seq.max_total for seq in step.decode)
        both = [seq for seq in self.last_decode if seq in step.decode]
        assert both == [seq for seq in step.decode if seq in self.last_decode], "the order of rows changed"
        self.last_decode = step.decode


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
