"""Which tokens of which sequences the next step computes. Pure Python: no JAX in here.

Policy, in this order, each step:
  1. every decoding sequence computes one token;
  2. prompts that are partly computed go on, best first, within the prefill budget;
  3. waiting sequences are admitted, best first, while budget, slots and pages last.
"Best" is the lowest (priority, arrival). When 1 or 2 needs a page and none is left, the worst running sequence loses
its pages and waits again (preemption by recompute; much of it is still in the prefix cache later). One that is itself the
worst sits the step out instead, with its pages, until a better one needs them. So the best always advances, and
the engine cannot lock up. A waiting sequence of strictly better priority displaces the worst running one, one a step.

The loop may call schedule() for the next step before it has read the tokens of earlier ones, to any depth: counts advance
as soon as a step is scheduled, and the engine must dispatch every step that schedule() returns, in order.

With several lanes, devices that each hold other sequences' pages, a sequence is in one from admission to preemption or end:
where most of its prompt is cached, then where most pages are left. Each lane has its own share of rows and prefill budget,
and a sequence that needs a page displaces the worst of its lane alone. The best of each lane advances.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Several
from itertools import chain
from operator import attrgetter

from jaxinfer.engine.media import MediaRows
from jaxinfer.engine.sequence import PrefillChunk, Sequence, SequenceStatus, Step
from jaxinfer.errors import ConfigError, OverloadError, RequestError
from jaxinfer.kv.manager import KVManager

_rank = attrgetter("priority", "arrival")
_ADMISSION_RESERVE = 0.01  # share of the pool left to running sequences when one is admitted, so that it is not preempted at once


class Scheduler:
    """Owns the queue, the running sequences and, through `kv`, all pages. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        kv: KVManager | Several[KVManager],
        *,
        max_num_seqs: int,
        max_prefill_tokens: int,
        max_prefill_seqs: int = 8,
        max_lane_seqs: int | None = None,
        prefill_block: int = 1,
        max_waiting: int = 100_000,
        media_rows: MediaRows | None = None,
    ):
        """
        Args:
          kv: of each lane; all alike.
          max_prefill_tokens: of all chunks of a step in one lane, each rounded up to a multiple of prefill_block.
          max_lane_seqs: sequences that run in one lane; None: all may.
          media_rows: of models that take images.
        """
        if max_prefill_tokens < prefill_block:
            raise ConfigError(
                f"max_prefill_tokens={max_prefill_tokens} is less than one block of {prefill_block} tokens: raise it"
            )
        self.lanes = [kv] if isinstance(kv, KVManager) else list(kv)
        self.kv = self.lanes[0]
        self.waiting: list[Sequence] = []  # best first
        self.prefilling: list[Sequence] = []  # in order of admission
        self.decoding: list[Sequence] = []
        self.num_preemptions = 0  # since the start
        self._max_prefill_tokens = max_prefill_tokens
        self._max_prefill_seqs = max_prefill_seqs
        self._block = prefill_block
        self._max_waiting = max_waiting
        self._max_num_seqs = max_num_seqs
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._media_rows = media_rows
        self._max_lane_seqs = max_num_seqs if max_lane_seqs is None else max_lane_seqs
        self._running = [0] * len(self.lanes)
        self._reserve = int(self.kv.pool.total * _ADMISSION_RESERVE)
        self._arrivals = 0
        self._draft = Step()
        self._filled: list[PrefillChunk] = []

    @property
    def has_work(self) -> bool:
        return bool(self.decoding or self.prefilling or self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queues a sequence. Raises OverloadError when the queue is full, RequestError if it could never run."""
        if len(self.waiting) >= self._max_waiting:
            raise OverloadError(
                f"{len(self.waiting)} requests are waiting, the most allowed: try again later"
            )
        if not 0 < len(seq.tokens) < seq.max_total:
            raise RequestError(
                f"a prompt of {len(seq.tokens)} tokens does not fit: it needs at least 1, and room for one more in {seq.max_total}",
                code="context_length_exceeded",
            )
        # The last token is never computed: it is sampled, and that is the end.
        pages = self.kv.pages_alone(seq.max_total - 1, self._max_prefill_tokens)
        if pages > self.kv.pool.total:
            raise RequestError(
                f"{seq.max_total} tokens need {pages} KV pages, the cache has {self.kv.pool.total}: lower max_tokens",
                code="context_length_exceeded",
            )
        if seq.media is not None:
            rows = 0 if self._media_rows is None else self._media_rows.total
            if len(seq.media.positions) > rows:
                raise RequestError(
                    f"the prompt's images take {len(seq.media.positions)} tokens, the most allowed is {rows}: "
                    "send fewer or smaller ones",
                    param="messages",
                )
        seq.arrival = self._arrivals
        self._arrivals += 1
        insort(self.waiting, seq, key=_rank)

    def schedule(self) -> Step | None:
        """The next step, or None if nothing can run until a token is read or a sequence is added."""
        for chunk in self._filled:
            self.lanes[chunk.seq.lane].publish(chunk.seq)
            if chunk.samples:
                self._give_media_rows(chunk.seq)
        step = self._draft
        preempted = len(step.preempted)
        self._schedule_decodes(step)
        budgets = self._continue_prefills(step)
        if len(step.preempted) == preempted:  # else pages have just run out
            self._admit(step, budgets)
        self._filled = step.prefill
        if not (step.decode or step.prefill):
            return None  # the draft keeps its table updates for the step to come
        self._draft = Step()
        step.preempted = [seq for seq in step.preempted if seq.status is SequenceStatus.WAITING]
        for seq in step.decode:
            seq.num_computed += 1
            seq.num_pending += 1
        for seq, _, length, samples in step.prefill:
            seq.num_computed += length
            if samples:
                seq.num_pending += 1
                self.prefilling.remove(seq)
                self.decoding.append(seq)
        return step

    def append_token(self, seq: Sequence, token_id: int) -> bool:
        """Records a token read from the device. False, and no effect, if the sequence is already finished."""
        if seq.status is SequenceStatus.FINISHED:
            return False
        seq.tokens.append(token_id)
        seq.num_pending -= 1
        return True

    def finish(self, seq: Sequence) -> None:
        """Ends a sequence at any moment, with steps in flight or not; no effect the second time."""
        if seq.status is SequenceStatus.WAITING:
            index = bisect_left(self.waiting, _rank(seq), key=_rank)
            if self.waiting[index : index + 1] == [seq]:  # not so if add() refused it
                del self.waiting[index]
        elif seq.status is SequenceStatus.RUNNING:
            self._vacate(seq)
        seq.status = SequenceStatus.FINISHED

    abort = finish  # whoever ends it, the pages go back the same way

    def check_integrity(self) -> None:
        """Raises RuntimeError if a page or slot is lost or held twice, or a count is off. Safe between any two calls."""
        running = [*self.decoding, *self.prefilling]
        if sorted([*self._slots, *(seq.slot for seq in running)]) != list(range(self._max_num_seqs)):
            raise RuntimeError(
                "scheduler: free slots and those of running sequences are not all slots, each once"
            )
        if self.waiting != sorted(self.waiting, key=_rank):
            raise RuntimeError("scheduler: the waiting queue is out of order")
        for seq in self.waiting:
            if seq.status is not SequenceStatus.WAITING or seq.slot != -1 or seq.tables or seq.num_computed:
                raise RuntimeError(f"scheduler: waiting sequence {seq.seq_id} still holds a slot or pages")
        for seq in running:
            behind = len(seq.tokens) + seq.num_pending - seq.num_computed
            wrong = seq.num_pending < 0 or behind < 1 or (behind > 1 and seq in self.decoding)
            if wrong or seq.status is not SequenceStatus.RUNNING:
                raise RuntimeError(f"scheduler: the counts of running sequence {seq.seq_id} are off")
        for lane, kv in enumerate(self.lanes):
            own = [seq for seq in running if seq.lane == lane]
            if not len(own) == self._running[lane] <= self._max_lane_seqs:
                raise RuntimeError(
                    f"scheduler: {len(own)} sequences run in lane {lane}, not {self._running[lane]}"
                )
            kv.check_integrity(own)

    def _schedule_decodes(self, step: Step) -> None:
        page_size = self.kv.page_size
        for seq in tuple(self.decoding):
            position = seq.num_computed
            if position + 1 >= seq.max_total:
                continue  # all its tokens are sampled; it waits to be finished
            if seq.needs_tokens and seq.num_pending:
                continue
            # One preempted earlier in this loop has position 0, so _make_room() sees it.
            if position % page_size == 0 and not self._make_room(seq, position + 1, step):
                continue
            step.decode.append(seq)

    def _continue_prefills(self, step: Step) -> list[int]:
        """Schedules chunks of sequences already admitted; returns the rest of each lane's budget, in tokens."""
        budgets = [self._max_prefill_tokens] * len(self.lanes)
        for seq in sorted(self.prefilling, key=_rank):
            length = self._chunk_length(len(seq.tokens) - seq.num_computed, step, budgets[seq.lane])
            if length and self._make_room(seq, seq.num_computed + length, step):
                budgets[seq.lane] -= self._add_chunk(step, seq, length)
        return budgets

    def _admit(self, step: Step, budgets: list[int]) -> None:
        index, displaced = 0, False
        while index < len(self.waiting) and self._chunk_length(1, step, max(budgets)):
            seq = self.waiting[index]
            if len(seq.tokens) + seq.num_pending >= seq.max_total or not seq.leader_is_done:
                index += 1  # has all its tokens but the last read, or will soon find its prompt cached
                continue
            if seq.num_pending:
                return  # preempted a moment ago: recomputing needs tokens not read yet, and nobody overtakes it
            length = self._start(seq, step, budgets)
            if length:
                del self.waiting[index]
                budgets[seq.lane] -= self._add_chunk(step, seq, length)
            if displaced:
                return
            if not length:
                if self._slots and self._lacks_budget(budgets):
                    return
                running = self.decoding or self.prefilling
                if not running or self._worst().priority <= seq.priority:
                    return
                self._preempt(self._worst(), step)
                displaced = True

    def _start(self, seq: Sequence, step: Step, budgets: list[int]) -> int:
        """Gives a waiting sequence a slot, its cached prefix and pages for its first chunk; its length, 0 if none fits."""
        if not self._slots:
            return 0
        for cached, lane in self._lanes_for(seq):
            length = self._start_in(lane, seq, step, cached, budgets[lane])
            if length:
                return length
        return 0

    def _lanes_for(self, seq: Sequence) -> list[tuple[int, int]]:
        """(cached tokens, lane) where there is a row for a waiting sequence, the best first."""
        free = [lane for lane, count in enumerate(self._running) if count < self._max_lane_seqs]
        found = [(self.lanes[lane].match(seq), lane) for lane in free]
        if len(found) > 1:
            found.sort(key=lambda one: (-one[0], -self.lanes[one[1]].pool.available))
        return found

    def _lacks_budget(self, budgets: list[int]) -> bool:
        """Whether some lane has a row, but no budget left in this step."""
        lanes = zip(self._running, budgets, strict=True)
        return any(count < self._max_lane_seqs and budget < self._block for count, budget in lanes)

    def _start_in(self, lane: int, seq: Sequence, step: Step, cached: int, budget: int) -> int:
        length = self._chunk_length(len(seq.tokens) - cached, step, budget)
        if not length:
            return 0
        reserve = self._reserve if self._running[lane] else 0
        if not self._take_media_rows(seq, cached):
            return 0
        seq.slot = self._slots[-1]
        if not self.lanes[lane].admit(seq, cached, cached + length, step.table_updates, reserve=reserve):
            seq.slot = -1
            self._give_media_rows(seq)
            return 0
        self._slots.pop()
        seq.lane = lane
        self._running[lane] += 1
        seq.status = SequenceStatus.RUNNING
        self.prefilling.append(seq)
        if not seq.num_preemptions:
            seq.cached_tokens = cached
        return length

    def _take_media_rows(self, seq: Sequence, cached: int) -> bool:
        """Rows for the images of a sequence, unless all of them are cached; False if too few are free now."""
        if seq.media is None or cached > seq.media.positions[-1]:
            return True
        assert self._media_rows is not None  # add() has checked it
        return self._media_rows.take(seq.media)

    def _give_media_rows(self, seq: Sequence) -> None:
        if seq.media is not None and self._media_rows is not None:
            self._media_rows.give(seq.media)

    def _chunk_length(self, remaining: int, step: Step, budget: int) -> int:
        """Tokens of the next chunk, 0 if this step takes no more; only the last chunk of a prompt is not whole blocks."""
        if len(step.prefill) >= self._max_prefill_seqs:
            return 0
        return min(remaining, budget // self._block * self._block)

    def _add_chunk(self, step: Step, seq: Sequence, length: int) -> int:
        """Adds a chunk and returns what it costs of the budget."""
        end = seq.num_computed + length
        step.prefill.append(PrefillChunk(seq, seq.num_computed, length, end == len(seq.tokens)))
        return -(-length // self._block) * self._block

    def _make_room(self, seq: Sequence, end: int, step: Step) -> bool:
        """Pages for the positions of a running sequence before `end`, if need be those of worse ones; False: not now."""
        if seq.status is not SequenceStatus.RUNNING:
            return False  # preempted earlier in this step
        while not self.lanes[seq.lane].extend(seq, end, step.table_updates):
            worst = self._worst(seq.lane)
            if worst is seq:
                return False
            self._preempt(worst, step)
        return True

    def _worst(self, lane: int | None = None) -> Sequence:
        """Of a lane's running sequences, or of all."""
        running = chain(self.decoding, self.prefilling)
        return max((seq for seq in running if lane is None or seq.lane == lane), key=_rank)

    def _preempt(self, seq: Sequence, step: Step) -> None:
        """Takes a running sequence's pages and slot, and its work out of this step; it waits at its old place."""
        if seq in step.decode:
            step.decode.remove(seq)
        step.prefill = [chunk for chunk in step.prefill if chunk.seq is not seq]
        self._vacate(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        step.preempted.append(seq)
        insort(self.waiting, seq, key=_rank)

    def _vacate(self, seq: Sequence) -> None:
        (self.prefilling if seq in self.prefilling else self.decoding).remove(seq)
        self.lanes[seq.lane].release(seq)
        self._running[seq.lane] -= 1
        self._give_media_rows(seq)
        self._slots.append(seq.slot)
        seq.slot = -1
