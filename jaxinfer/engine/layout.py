"""What the host gives the programs of a step: one array of integers each, since every further argument costs time in each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxinfer.engine.buckets import Bucket

# Of `sample`: a row of integers, then of floats' bits, for each token.
ROW_INTS = ("slot", "top_k", "seed_low", "seed_high", "position")
ROW_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ForwardLayout:
    """How one int32 array carries a step's tokens, positions, kv lengths, rows to sample for, and page tables.

    A token below 0 stands for the last token sampled in slot -1 - token, which the host may not have read yet.
    """

    bucket: Bucket
    groups: int
    table_width: int

    @property
    def size(self) -> int:
        b = self.bucket
        return 2 * b.num_tokens + b.samples + b.num_rows * (1 + self.groups * self.table_width)

    def views(self, ints: Any) -> tuple[Any, Any, Any, Any, Any]:
        """tokens [T], positions [T], kv_lens [R], samples [S], tables [G, R, pages] of an array (numpy or JAX) of `size`."""
        t, r, s = self.bucket.num_tokens, self.bucket.num_rows, self.bucket.samples
        tokens, positions, kv_lens, samples, tables = (
            ints[start:stop]
            for start, stop in (
                (0, t),
                (t, 2 * t),
                (2 * t, 2 * t + r),
                (2 * t + r, 2 * t + r + s),
                (2 * t + r + s, None),
            )
        )
        return tokens, positions, kv_lens, samples, tables.reshape(self.groups, r, self.table_width)
