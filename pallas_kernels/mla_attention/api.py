"""Chooses a form of latent attention by shape, and its implementation by name or by platform."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import choose
from pallas_kernels.mla_attention.reference import absorbed_reference, expanded_reference

Form = Literal["absorbed", "expanded"]


def mla_attention(
    q: Float[Array, "R Q H d"],
    pages: Float[Array, "1 1 P page L"],
    tables: Int[Array, "R pages"],
    q_start: Int[Array, " R"],
    kv_lens: Int[Array, " R"],
    kv_b: Float[Array, "H out rank"],
    *,
    scale: float,
    form: Form | Literal["auto"] = "auto",
    impl: str = "auto",
) -> Float[Array, "R Q H v"]:
    """Causal latent attention (arXiv:2405.04434) of R rows of Q consecutive queries, each row over the pages of its own sequence.

    Args:
      q: queries, nope dimensions and then rope rotated ones; query j of row r stands at position q_start[r] + j.
      pages: one row a position: its normalised latent [rank], then its rotated key [rope] that all heads share.
      tables: the page that holds positions [i * page, (i + 1) * page) of the row's sequence.
      kv_lens: positions that exist, those of the row's own queries included; 0: a padding row, whose result is 0.
      kv_b: [H, nope + v, rank]: makes a head's keys and then its values from latents.
      scale: factor on q . k.
      form: "absorbed" multiplies kv_b into queries and results, "expanded" makes keys and values, a block of positions at a time;
        "auto" takes the one with less arithmetic.
      impl: "auto" takes the C++ kernel on CPU where it can do the form, shape and dtypes, else XLA.
    Pages out of a query's sight may hold anything, NaN included.
    """
    if form == "auto":
        form = cheaper_form(q.shape[1], *kv_b.shape[1:])
    reference = absorbed_reference if form == "absorbed" else expanded_reference
    return choose(
        impl,
        q,
        pages,
        tables,
        q_start,
        kv_lens,
        kv_b,
        kernel=functools.partial(absorbed_native, scale=scale),
        reference=functools.partial(reference, scale=scale),
        fits=form == "absorbed" and _fits(q, pages, kv_b),
    )


def absorbed_native(
    q: Float[Array, "R Q H d"],
    pages: Float[Array, "1 1 P page L"],
    tables: Int[Array, "R pages"],
    q_start: Int[Array, " R"],
    kv_lens: Int[Array, " R"],
    kv_b: Float[Array, "H out rank"],
    *,
    scale: float,
) -> Float[Array, "R Q H v"]:
    """The kernel in native.cc. The latent's width must be a multiple of 16."""
    nope = q.shape[-1] - (pages.shape[-1] - kv_b.shape[2])
    out = jax.ShapeDtypeStruct((*q.shape[:3], kv_b.shape[1] - nope), jnp.float32)
    call = jax.ffi.ffi_call("jaxinfer_mla_attention", out)
    ints = (x.astype(jnp.int32) for x in (tables, q_start, kv_lens))
    # XLA fuses the conversions into what makes the queries and what takes the results.
    return call(q.astype(jnp.float32), pages, *ints, kv_b, scale=np.float32(scale)).astype(q.dtype)


def cheaper_form(queries: int, out: int, rank: int) -> Form:
    """The form with fewer multiplications a position and head, for rows of so many queries.

    Absorbed, a query costs rank + rope in its score and rank in its result; expanded, nope + rope and v (nope + v = out), but
    then the position's own key and value cost out * rank. DeepSeek-V3's 256 and 512 give 171 queries.
    """
    return "expanded" if queries * (2 * rank - out) > out * rank else "absorbed"


def _fits(q: jax.Array, pages: jax.Array, kv_b: jax.Array) -> bool:
    floats = (jnp.float32, jnp.bfloat16)
    return all(x.dtype in floats for x in (q, pages, kv_b)) and kv_b.shape[2] % 16 == 0
