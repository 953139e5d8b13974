"""Chooses an implementation of paged attention by name or by platform."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import choose
from pallas_kernels.paged_attention.reference import paged_attention_reference


def paged_attention(
    q: Float[Array, "R Q H hd"],
    kv_pages: Float[Array, "2 KV P page hd"],
    tables: Int[Array, "R pages"],
    q_start: Int[Array, " R"],
    kv_lens: Int[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    impl: str = "auto",
) -> Float[Array, "R Q H hd"]:
    """Causal attention of R rows of Q consecutive queries, each row over the pages of its own sequence.

    Args:
      q: queries; query j of row r stands at position q_start[r] + j.
      kv_pages: keys (0) and values (1) of every page; H must be a multiple of KV, heads of a group adjacent.
      tables: the page that holds positions [i * page, (i + 1) * page) of the row's sequence.
      kv_lens: positions that exist, those of the row's own queries included; 0: a padding row, whose result is 0.
      scale: factor on q . k.
      window: a query sees this many positions, its own included.
      chunk: a query sees the positions from the last multiple of this up to its own.
      softcap: c in c * tanh(score / c).
      sinks: a score of each head that takes its share of the softmax and gives no value.
      impl: "auto" takes the C++ kernel on CPU where it can do the shape and dtypes, else XLA.
    Pages out of a query's sight may hold anything, NaN included.
    """
    options = {"scale": scale, "window": window, "chunk": chunk}
    kernel = functools.partial(paged_attention_native, **options)
    reference = functools.partial(paged_attention_reference, **options, softcap=softcap, sinks=sinks)
    arrays = (q, kv_pages, tables, q_start, kv_lens)
    fits = _fits(q, kv_pages) and softcap is None and sinks is None
    return choose(impl, *arrays, kernel=kernel, reference=reference, fits=fits)


def paged_attention_native(
    q: Float[Array, "R Q H hd"],
    kv_pages: Float[Array, "2 KV P page hd"],
    tables: Int[Array, "R pages"],
    q_start: Int[Array, " R"],
    kv_lens: Int[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
) -> Float[Array, "R Q H hd"]:
    """The kernel in native.cc. The head width must be a multiple of 16."""
    call = jax.ffi.ffi_call("jaxinfer_paged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    ints = (x.astype(jnp.int32) for x in (tables, q_start, kv_lens))
    spans = {"window": np.int64(window or 0), "chunk": np.int64(chunk or 0)}
    return call(q, kv_pages, *ints, scale=np.float32(scale), **spans)


def _fits(q: jax.Array, kv_pages: jax.Array) -> bool:
    floats = (jnp.float32, jnp.bfloat16)
    return q.dtype in floats and kv_pages.dtype in floats and q.shape[-1] % 16 == 0
