"""From a scheduled step to the arrays its programs take. NumPy only; vectorised over sequences where it is paid every step."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from itertools import count

import numpy as np

from jaxinfer.engine.buckets import Bucket, BucketTable
from jaxinfer.engine.layout import ROW_FLOATS, ROW_INTS, ForwardLayout
from jaxinfer.engine.media import PromptMedia
from jaxinfer.engine.request import SamplingParams
from jaxinfer.engine.sequence import Sequence, Step

_POSITION = ROW_INTS.index("position")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What the devices need of one step: host arrays, never written again, since they may be read after dispatch returns.

    Attributes:
      ints: for `forward`, laid out by ForwardLayout.
      rows: for `sample`, int32 [S, 11], ROW_INTS then the bits of ROW_FLOATS.
      samples: some row gets a token.
      full: some row needs penalties, biases or log-probabilities.
    """

    bucket: Bucket
    ints: np.ndarray
    rows: np.ndarray
    samples: bool
    full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays(StepInputs):
    """What the host needs of it besides.

    Attributes:
      sampled: the sequences that get a token, in the order of the rows; rows past them are padding.
      chunk_starts: index of each prefill chunk's first token among the T tokens.
    """

    sampled: list[Sequence]
    chunk_starts: list[int]


class BatchBuilder:
    """Mirrors every slot's page tables and sampling parameters, and cuts a step's arrays out of them.

    Of several lanes each has an equal part of the decode rows, and one of the blocks, in the order of the lanes.
    """

    def __init__(
        self, buckets: BucketTable, *, num_slots: int, groups: int, table_width: int, vocab_size: int = 0
    ):
        """
        Args:
          num_slots: as in StepPrograms; the last slot is padding's own.
          vocab_size: a placeholder's row r of the media buffer is named by token vocab_size + r.
        """
        self._vocab_size = vocab_size
        self._buckets = buckets
        self._groups, self._width = groups, table_width
        self._tables = np.zeros((groups, num_slots, table_width), np.int32)
        self._rows = np.zeros((num_slots, len(ROW_INTS) + len(ROW_FLOATS)), np.int32)
        self._rows[:, 0] = np.arange(num_slots)
        self._row_floats = self._rows[:, len(ROW_INTS) :].view(np.float32)
        self._full = np.zeros(num_slots, bool)
        self._padding = num_slots - 1
        self._layouts: dict[Bucket, ForwardLayout] = {}

    def set_row(self, slot: int, params: SamplingParams, seed: int, *, full: bool) -> None:
        """Gives a slot to a sequence with these parameters; seed is any 64-bit integer."""
        low, high = np.array([seed & (2**64 - 1)], np.uint64).view(np.int32)
        self._rows[slot, 1:_POSITION] = params.top_k, low, high
        self._row_floats[slot] = [getattr(params, name) for name in ROW_FLOATS]
        self._full[slot] = full

    def build(self, step: Step) -> StepArrays:
        for slot, group, index, page in step.table_updates:
            self._tables[group, slot, index] = page
        decode, chunks = step.decode, step.prefill
        block = self._buckets.block
        lanes = self._buckets.lanes
        blocks: Counter[int] = Counter()
        for chunk in chunks:
            blocks[chunk.seq.lane] += -(-chunk.length // block)
        n = len(decode)
        counts = Counter(seq.lane for seq in decode) if lanes > 1 else {0: n}
        bucket = self._buckets.fit(max(counts.values(), default=0), max(blocks.values(), default=0))
        lane_rows, lane_blocks = bucket.decode // lanes, bucket.blocks // lanes
        layout = self._layouts.get(bucket)
        if layout is None:
            layout = self._layouts[bucket] = ForwardLayout(bucket, self._groups, self._width)
        ints = np.zeros(layout.size, np.int32)
        tokens, positions, kv_lens, samples, tables = layout.views(ints)

        slots = [seq.slot for seq in decode]
        lens = [seq.num_computed for seq in decode]
        rows = list(range(n))
        if n:
            places: slice | list[int] = slice(n)
            if lanes > 1:
                free = [count(lane * lane_rows) for lane in range(lanes)]
                places = rows = [next(free[seq.lane]) for seq in decode]
            kv_lens[places] = lens
            positions[places] = kv_lens[places] - 1
            tokens[places] = [
                seq.tokens[length - 1] if length <= len(seq.tokens) else -1 - seq.slot
                for seq, length in zip(decode, lens, strict=True)
            ]
            tables[:, places] = self._tables[:, slots]

        sampled = list(decode)
        chunk_starts = []
        blocks.clear()
        for seq, first, length, samples_token in chunks:
            place = seq.lane * lane_blocks + blocks[seq.lane]
            start, row = bucket.decode + place * block, bucket.decode + place
            chunk_starts.append(start)
            end = start + length
            tokens[start:end] = seq.tokens[first : first + length]
            if seq.media is not None and seq.media.rows:
                self._name_rows(tokens[start:end], seq.media, first)
            num_blocks = -(-length // block)
            positions[start : start + num_blocks * block] = np.arange(first, first + num_blocks * block)
            kv_lens[row : row + num_blocks] = np.minimum(np.arange(1, num_blocks + 1) * block, length) + first
            tables[:, row : row + num_blocks] = self._tables[:, seq.slot, None]
            if samples_token:
                sampled.append(seq)
                rows.append(end - 1)
                slots.append(seq.slot)
                lens.append(first + length)
            blocks[seq.lane] += num_blocks
        samples[: len(rows)] = rows

        padded = slots + [self._padding] * (bucket.samples - len(slots))
        sample_rows = self._rows[padded]
        sample_rows[: len(lens), _POSITION] = lens
        return StepArrays(
            bucket=bucket,
            ints=ints,
            samples=bool(sampled),
            sampled=sampled,
            chunk_starts=chunk_starts,
            rows=sample_rows,
            full=bool(self._full[slots].any()),
        )

    def _name_rows(self, tokens: np.ndarray, media: PromptMedia, first: int) -> None:
        """Replaces the placeholders among the tokens of positions [first, first + length)."""
        low, high = (bisect_left(media.positions, position) for position in (first, first + len(tokens)))
        places = np.asarray(media.positions[low:high], np.int32) - first
        tokens[places] = self._vocab_size + np.asarray(media.rows[low:high], np.int32)
