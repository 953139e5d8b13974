"""Chooses an implementation of the grouped product by name or by platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.dispatch import choose
from pallas_kernels.grouped_linear.reference import (
    grouped_linear_blocks_reference,
    grouped_linear_reference,
)
from pallas_kernels.linear.blocks import BlockWeights

GroupedWeight = Float[Array, "E N K"] | BlockWeights


def grouped_linear(
    x: Float[Array, "M K"], weight: GroupedWeight, group_sizes: Int32[Array, " E"], *, impl: str = "auto"
) -> Float[Array, "M N"]:
    """Each row of x times the transposed matrix of its group, with float32 accumulation and result.

    Matrices of groups without rows are not read.

    Args:
      x: rows sorted by group.
      weight: a matrix a group.
      group_sizes: rows of each group; the rows that they leave over give zeros.
      impl: "auto" takes the C++ kernel on CPU where it can do the shape and dtypes, else XLA.
    """
    if isinstance(weight, BlockWeights):
        kernel, reference = grouped_linear_blocks_native, grouped_linear_blocks_reference
        return choose(impl, x, group_sizes, *weight, kernel=kernel, reference=reference, fits=True)
    kernel, reference = grouped_linear_native, grouped_linear_reference
    return choose(impl, x, group_sizes, weight, kernel=kernel, reference=reference, fits=_fits(x, weight))


def grouped_linear_native(
    x: Float[Array, "M K"], group_sizes: Int[Array, " E"], weight: Float[Array, "E N K"]
) -> Float[Array, "M N"]:
    """The kernel in native.cc. K must be a multiple of 16."""
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), jnp.float32)
    return jax.ffi.ffi_call("jaxinfer_grouped_linear", out)(x.astype(jnp.float32), group_sizes, weight)


def grouped_linear_blocks_native(
    x: Float[Array, "M K"], group_sizes: Int[Array, " E"], codes: Array, scales: Array
) -> Float[Array, "M N"]:
    """The kernel in native.cc for the codes and scales of BlockWeights."""
    out = jax.ShapeDtypeStruct((x.shape[0], codes.shape[1]), jnp.float32)
    return jax.ffi.ffi_call("jaxinfer_grouped_linear_blocks", out)(
        x.astype(jnp.float32), group_sizes, codes, scales
    )


def _fits(x: jax.Array, weight: jax.Array) -> bool:
    floats = (jnp.float32, jnp.bfloat16)
    return x.dtype in floats and weight.dtype in floats and x.shape[1] % 16 == 0
