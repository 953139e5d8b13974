"""The device side of the paged KV cache: its arrays, what a step knows about them, and the writes.

A cache is a tuple of arrays, one for each layer of a page group, [planes, KV, P, page, hd]: keys and values (or one plane of
latents, for MLA), kv heads, pages. Heads lead, so that attention's batched products see their batch dimensions first without
a transpose.
Page 0 is the dump: padding writes there and nothing reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

DUMP_PAGE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Shape of a cache; `bytes_per_page` is what one page costs over all its arrays.

    Attributes:
      arrays: layers of the largest page group.
      planes: 2 for keys and values, 1 for what stands for both.
      page_size: tokens.
    """

    arrays: int
    planes: int = 2
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: DTypeLike

    @property
    def bytes_per_page(self) -> int:
        values = self.arrays * self.planes * self.kv_heads * self.page_size * self.head_dim
        return values * jnp.dtype(self.dtype).itemsize

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Of one array."""
        return (self.planes, self.kv_heads, num_pages, self.page_size, self.head_dim)

    def init(self, num_pages: int) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(self.shape(num_pages), self.dtype) for _ in range(self.arrays))

    def abstract(self, num_pages: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(self.shape(num_pages), self.dtype),) * self.arrays


@dataclass(frozen=True)
class StepBatch:
    """Where the T flat tokens of a step belong.

    The tokens are `num_decode` rows of one token each, then blocks of `block` tokens; a block holds consecutive
    tokens of one sequence, starts on a page boundary, and is padded at its end only. Each row and each block has
    an entry in `tables` and `kv_lens`.

    Attributes:
      positions: place of each token in its sequence.
      tables: page of each `page` positions, for every page group G, row or block R; entries at or past kv_lens are garbage.
      kv_lens: number of positions of the sequence that exist once this step's are written; 0 marks padding.
      lanes: equal parts of the rows, and of the blocks, whose tables name pages of one device each; 1: all devices have all pages.
    """

    positions: Int[Array, " T"]
    tables: Int[Array, "G R pages"]
    kv_lens: Int[Array, " R"]
    num_decode: int
    block: int
    lanes: int = 1

    @property
    def num_blocks(self) -> int:
        return self.kv_lens.shape[0] - self.num_decode


jax.tree_util.register_dataclass(
    StepBatch, data_fields=["positions", "tables", "kv_lens"], meta_fields=["num_decode", "block", "lanes"]
)


def write_kv(
    pages: Float[Array, "planes KV P page hd"],
    rows: Sequence[Float[Array, "T KV hd"]],
    batch: StepBatch,
    group: int,
) -> Float[Array, "planes KV P page hd"]:
    """Writes a step's rows, one array a plane (keys and values), to their pages: decode rows by slot, blocks by whole pages.

    Decode rows must be none or several: XLA turns a scatter of one row into a slice update, and copies the cache for it.

    A block's padding lands in the unused end of its sequence's last page, where later tokens overwrite it before
    anything reads it, or in the dump page.
    """
    planes, _, _, page, _ = pages.shape
    kv = jnp.stack(rows).astype(pages.dtype)  # [planes, T, KV, hd]
    n, tables = batch.num_decode, batch.tables[group]
    if n:
        positions = batch.positions[:n]
        live = batch.kv_lens[:n] > 0
        index = jnp.take_along_axis(tables[:n], (positions // page)[:, None], axis=1, mode="clip")[:, 0]
        index = jnp.where(live, index, DUMP_PAGE)
        heads_first = kv[:, :n].transpose(0, 2, 1, 3)  # [planes, KV, n, hd]
        pages = pages.at[:, :, index, positions % page].set(heads_first, mode="promise_in_bounds")
    if batch.num_blocks:
        blocks, per_block = batch.num_blocks, batch.block // page
        first = batch.positions[n :: batch.block] // page
        entry = first[:, None] + jnp.arange(per_block)
        index = jnp.take_along_axis(tables[n:], entry, axis=1, mode="clip")
        # Table entries past a sequence's end are stale: they may name pages of others.
        index = jnp.where(entry * page < batch.kv_lens[n:, None], index, DUMP_PAGE)
        whole = kv[:, n:].reshape(planes, blocks * per_block, page, *kv.shape[2:]).transpose(0, 3, 1, 2, 4)
        pages = pages.at[:, :, index.reshape(-1)].set(whole, mode="promise_in_bounds")
    return pages
