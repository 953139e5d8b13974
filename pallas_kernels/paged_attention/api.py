"""Chooses an implementation of paged attention by name or by platform."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.reference import paged_attention_reference

IMPLEMENTATIONS = ("auto", "reference")


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
    Pages out of a query's sight may hold anything, NaN included.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    return paged_attention_reference(
        q, kv_pages, tables, q_start, kv_lens, scale=scale, window=window, chunk=chunk
    )
