"""The device side of the paged KV cache: its arrays, what a step knows about them, and the writes.

A cache is a tuple of arrays, one for each layer of a page group, [2, KV, P, page, hd]: keys and values, kv heads, pages.
Heads lead, so that attention's batched products see their batch dimensions first without a transpose.
Page 0 is the dump: padding writes there and nothing reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

DUMP_PAGE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Shape of a cache; `bytes_per_page` is what one page costs over all its layers."""

    num_layers: int
    kv_heads: int
    head_dim: int
    page_size: int  # tokens
    dtype: DTypeLike

    @property
    def bytes_per_page(self) -> int:
        values = 2 * self.num_layers * self.kv_heads * self.page_size * self.head_dim
        return values * jnp.dtype(self.dtype).itemsize

    def layer_shape(self, num_pages: int) -> tuple[int, ...]:
        return (2, self.kv_heads, num_pages, self.page_size, self.head_dim)

    def init(self, num_pages: int) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(self.layer_shape(num_pages), self.dtype) for _ in range(self.num_layers))

    def abstract(self, num_pages: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(self.layer_shape(num_pages), self.dtype),) * self.num_layers


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
    """

    positions: Int[Array, " T"]
    tables: Int[Array, "G R pages"]
    kv_lens: Int[Array, " R"]
    num_decode: int
    block: int

    @property
    def num_blocks(self) -> int:
        return self.kv_lens.shape[0] - self.num_decode


jax.tree_util.register_dataclass(
    StepBatch, data_fields=["positions", "tables", "kv_lens"], meta_fields=["num_decode", "block"]
)


def write_kv(
    layer: Float[Array, "2 KV P page hd"],
    k: Float[Array, "T KV hd"],
    v: Float[Array, "T KV hd"],
    batch: StepBatch,
    group: int,
) -> Float[Array, "2 KV P page hd"]:
    """Writes a step's keys and values to their pages: decode rows by slot, blocks by whole pages.

    Decode rows must be none or several: XLA turns a scatter of one row into a slice update, and copies the cache for it.

    A block's padding lands in the unused end of its sequence's last page, where later tokens overwrite it before
    anything reads it, or in the dump page.
    """
    page = layer.shape[3]
    kv = jnp.stack([k, v]).astype(layer.dtype)  # [2, T, KV, hd]
    n, tables = batch.num_decode, batch.tables[group]
    if n:
        positions = batch.positions[:n]
        live = batch.kv_lens[:n] > 0
        pages = jnp.take_along_axis(tables[:n], (positions // page)[:, None], axis=1, mode="clip")[:, 0]
        pages = jnp.where(live, pages, DUMP_PAGE)
        rows = kv[:, :n].transpose(0, 2, 1, 3)  # [2, KV, n, hd]
        offsets = positions % page
        layer = layer.at[:, :, pages, offsets].set(rows, mode="promise_in_bounds")
    if batch.num_blocks:
        blocks, per_block = batch.num_blocks, batch.block // page
        first = batch.positions[n :: batch.block] // page
        index = first[:, None] + jnp.arange(per_block)
        pages = jnp.take_along_axis(tables[n:], index, axis=1, mode="clip")
        # Table entries past a sequence's end are stale: they may name pages of others.
        pages = jnp.where(index * page < batch.kv_lens[n:, None], pages, DUMP_PAGE)
        whole = kv[:, n:].reshape(2, blocks * per_block, page, *kv.shape[2:]).transpose(0, 3, 1, 2, 4)
        layer = layer.at[:, :, pages.reshape(-1)].set(whole, mode="promise_in_bounds")
    return layer
