"""Grouped products against float64, by every implementation."""

from __future__ import annotations

from typing import cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_linear import GroupedWeight, grouped_linear
from pallas_kernels.linear import BlockKind, BlockWeights, linear

KINDS = ("float32", "bfloat16", *get_args(BlockKind))


def random_weight(rng: np.random.Generator, kind: str, shape: tuple[int, int, int]) -> GroupedWeight:
    if "float" in kind:
        return jnp.asarray(rng.standard_normal(shape), kind)
    codes, scales = BlockWeights.abstract(cast(BlockKind, kind), shape)
    low, high = np.iinfo(codes.dtype).min, np.iinfo(codes.dtype).max
    return BlockWeights(
        jnp.asarray(rng.integers(low, high, codes.shape, codes.dtype, endpoint=True)),
        jnp.asarray(rng.standard_normal(scales.shape), scales.dtype),
    )


def dense(weight: GroupedWeight) -> np.ndarray:
    return np.asarray(weight.dense() if isinstance(weight, BlockWeights) else weight, np.float64)


def expected_of(x: jax.Array, weight: GroupedWeight, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how far a float32 sum of it may be off: a rounding for each doubling of terms, with room."""
    matrices, rows = dense(weight), np.asarray(x, np.float64)
    expected = np.zeros((len(rows), matrices.shape[1]))
    bound = np.full_like(expected, 1e-30)
    stop = 0
    for matrix, size in zip(matrices, sizes, strict=True):
        start, stop = stop, stop + size
        expected[start:stop] = rows[start:stop] @ matrix.T
        bound[start:stop] += 2.0**-21 * np.abs(rows[start:stop]) @ np.abs(matrix).T
    return expected, bound


@pytest.mark.parametrize("impl", ["reference", "native", "auto"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(
    sizes=st.lists(st.sampled_from([0, 0, 1, 2, 6, 7, 9, 33, 130]), min_size=1, max_size=7),
    left_over=st.sampled_from([0, 1, 20]),
    n=st.sampled_from([3, 67]),
    k=st.sampled_from([32, 800]),
    seed=st.integers(0, 99),
)
def test_equals_the_products(
    kind: str, impl: str, sizes: list[int], left_over: int, n: int, k: int, seed: int
):
    """Groups around the edges of the kernel's tiles of rows and of the reference's; K around the kernel's depth of 768."""
    rng = np.random.default_rng(seed)
    weight = random_weight(rng, kind, (len(sizes), n, k))
    x = jnp.asarray(rng.standard_normal((max(1, sum(sizes) + left_over), k)), jnp.float32)
    result = grouped_linear(x, weight, jnp.asarray(sizes, jnp.int32), impl=impl)
    expected, bound = expected_of(x, weight, sizes)
    assert result.dtype == jnp.float32
    assert (np.abs(result - expected) <= bound).all()


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_bfloat16_rows(impl: str):
    rng = np.random.default_rng(1)
    weight = random_weight(rng, "bfloat16", (3, 20, 64))
    x = jnp.asarray(rng.standard_normal((9, 64)), jnp.bfloat16)
    sizes = [4, 0, 5]
    expected, bound = expected_of(x, weight, sizes)
    assert (
        np.abs(grouped_linear(x, weight, jnp.asarray(sizes, jnp.int32), impl=impl) - expected) <= bound
    ).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_what_linear_makes_of_it(kind: str):
    """Bit for bit, whatever the sizes of its group and of the others."""
    rng = np.random.default_rng(2)
    weight = random_weight(rng, kind, (4, 67, 800))
    sizes = [1, 40, 0, 9]
    x = jnp.asarray(rng.standard_normal((sum(sizes), 800)), jnp.float32)
    result = np.asarray(grouped_linear(x, weight, jnp.asarray(sizes, jnp.int32), impl="native"))
    for row, group in enumerate(np.repeat(np.arange(4), sizes)):
        own = jax.tree.map(lambda part, group=group: part[group], weight)
        np.testing.assert_array_equal(result[row], linear(x[row : row + 1], own, impl="native")[0])


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_matrices_without_rows_do_not_matter(impl: str):
    weight = jnp.full((5, 8, 32), jnp.nan).at[jnp.asarray([1, 3])].set(1.0)
    sizes = jnp.asarray([0, 2, 0, 3, 0], jnp.int32)
    x = jnp.ones((6, 32)).at[5].set(jnp.nan)  # the last row is in no group
    result = np.asarray(grouped_linear(x, weight, sizes, impl=impl))
    np.testing.assert_array_equal(result[:5], np.full((5, 8), 32.0))
    np.testing.assert_array_equal(result[5], np.zeros(8))


@pytest.mark.parametrize("sizes", [[2, 2], [-1, 1]])
def test_sizes_that_do_not_fit_are_refused(sizes: list[int]):
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="group sizes must not be negative, nor exceed the rows"
    ):
        grouped_linear(
            jnp.ones((3, 16)), jnp.ones((2, 4, 16)), jnp.asarray(sizes, jnp.int32), impl="native"
        ).block_until_ready()


def test_shapes_it_cannot_do_fall_back_or_are_refused():
    x, weight, sizes = jnp.ones((2, 20)), jnp.ones((1, 3, 20)), jnp.asarray([2], jnp.int32)
    np.testing.assert_array_equal(grouped_linear(x, weight, sizes), np.full((2, 3), 20))
    with pytest.raises(ValueError, match="cannot do float32"):
        grouped_linear(x, weight, sizes, impl="native")
