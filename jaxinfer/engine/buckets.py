"""The few shapes that steps are compiled for. Pure Python."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from jaxinfer.config.engine import EngineConfig


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Shape of a step: `decode` rows of one token, then `blocks` prefill blocks of `block` tokens; `samples` new tokens."""

    decode: int
    blocks: int
    block: int
    samples: int

    @property
    def num_tokens(self) -> int:
        return self.decode + self.blocks * self.block

    @property
    def num_rows(self) -> int:
        return self.decode + self.blocks


class BucketTable:
    """All shapes of an engine, and the smallest that holds a given step.

    Decode-only steps have the finer grid; mixed steps are dominated by their prefill tokens, so they come with no,
    few, or all decode rows.
    """

    def __init__(self, config: EngineConfig, *, min_rows: int = 2, microbatches: int = 1, lanes: int = 1):
        """
        Args:
          min_rows: fewest rows that a shape has. With one, XLA makes other programs than with several: sums are ordered
            differently, and a request's tokens would depend on whether it runs alone; and it copies the cache to write one row.
          microbatches: even parts that the largest steps come in; the shapes are of such a part.
          lanes: devices that each hold other sequences' pages. All get as many rows and blocks as the fullest one needs.
        """
        self.block = config.prefill_block
        self.lanes = lanes
        # Of one lane: each may have its share of the sequences and of the prompts' tokens, and no more.
        self.lane_rows, self.lane_blocks = lane_limits(config, lanes)
        least = max(2, -(-min_rows // lanes))
        self._sample_sizes = _row_sizes(min_rows, config.max_num_seqs)
        self.row_sizes = _row_sizes(least, -(-self.lane_rows // microbatches))
        self._block_sizes = _doubling(1, -(-self.lane_blocks // microbatches), 4)
        # A single sequence never decodes beside a prefill.
        self._mixed_rows = sorted(
            {0, self.row_sizes[0], self.row_sizes[-1]} if config.max_num_seqs > 1 else {0}
        )

    def all(self) -> list[Bucket]:
        decode_only = [self._bucket(n, 0) for n in self.row_sizes]
        return decode_only + [self._bucket(n, b) for b in self._block_sizes for n in self._mixed_rows]

    def fit(self, decode: int, blocks: int) -> Bucket:
        """Smallest bucket with at least this many decode rows and prefill blocks in each lane."""
        if not blocks:
            return self._bucket(_at_least(self.row_sizes, decode), 0)
        return self._bucket(_at_least(self._mixed_rows, decode), _at_least(self._block_sizes, blocks))

    def _bucket(self, decode: int, blocks: int) -> Bucket:
        decode, blocks = decode * self.lanes, blocks * self.lanes
        # Every block may end a prompt, but no more sequences than a step can hold are there to sample for.
        samples = _at_least(self._sample_sizes, min(decode + blocks, self._sample_sizes[-1]))
        return Bucket(decode, blocks, self.block, samples)


def lane_limits(config: EngineConfig, lanes: int) -> tuple[int, int]:
    """Most sequences that one of `lanes` runs, and most prefill blocks that it has in a step."""
    blocks = config.max_prefill_tokens // config.prefill_block
    return -(-config.max_num_seqs // lanes), max(1, blocks // lanes)


def _row_sizes(least: int, most: int) -> list[int]:
    most = max(most, least)
    return [n for n in _doubling(least, most) if n in (least, most) or n >= 8]


def _doubling(low: int, high: int, factor: int = 2) -> list[int]:
    sizes = []
    size = low
    while size < high:
        sizes.append(size)
        size *= factor
    return [*sizes, high]


def _at_least(sizes: list[int], need: int) -> int:
    return sizes[bisect_left(sizes, need)]
