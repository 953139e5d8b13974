"""Linear products against float64, by every implementation."""

from __future__ import annotations

from typing import cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.linear import BlockKind, BlockWeights, linear


def test_the_kernels_are_built_here():
    """They need a C++ compiler; without one the package works, but these tests would prove nothing."""
    assert native.available()


@pytest.mark.parametrize("impl", ["reference", "native", "auto"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("values", ["float32", "bfloat16"])
def test_equals_the_product(impl: str, weights: str, values: str):
    """Rows of x around the edges of a tile of 6; of w around 4 and 64; K around the depth of 768."""
    rng = np.random.default_rng(0)
    for k in (16, 784):
        for n in (3, 64, 67):
            for m in (1, 5, 6, 7, 13):
                x = jnp.asarray(rng.standard_normal((m, k)), values)
                w = jnp.asarray(rng.standard_normal((n, k)), weights)
                expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
                # float32 sums of k products of size one round to about sqrt(k) * 2^-24, with room.
                result = linear(x, w, impl=impl)
                assert result.dtype == jnp.float32
                np.testing.assert_allclose(
                    result, expected, atol=6e-7 * k**0.5 + 1e-6 * np.abs(expected).max()
                )


def random_blocks(rng: np.random.Generator, kind: BlockKind, *shape: int) -> BlockWeights:
    """Every code, and scales of every size a float16 has."""
    codes, scales = BlockWeights.abstract(kind, shape)
    low, high = np.iinfo(codes.dtype).min, np.iinfo(codes.dtype).max
    values = rng.standard_normal(scales.shape) * 2.0 ** rng.integers(-22, 2, scales.shape)
    return BlockWeights(
        jnp.asarray(rng.integers(low, high, codes.shape, codes.dtype, endpoint=True)),
        jnp.asarray(values, scales.dtype),
    )


def values_of(w: BlockWeights) -> np.ndarray:
    """What BlockWeights says that its codes and scales mean, in float64."""
    scales = np.asarray(w.scales, np.float64)
    blocks = np.asarray(w.codes).reshape(*scales.shape[:-1], -1)
    if w.codes.dtype == jnp.uint8:
        blocks = np.concatenate([blocks & 15, blocks >> 4], -1)
    if w.scales.dtype == jnp.bfloat16:
        blocks = blocks - 8.0
    offsets = scales[..., 1:] if scales.shape[-1] == 2 else 0
    return (blocks * scales[..., :1] + offsets).reshape(w.shape)


@pytest.mark.parametrize("impl", ["reference", "native", "auto"])
@pytest.mark.parametrize("kind", get_args(BlockKind))
def test_weights_in_blocks(impl: str, kind: BlockKind):
    """Rows of x around the edges of a tile and around the 32 up to which weights are not widened first."""
    rng = np.random.default_rng(0)
    for n, k in ((3, 32), (64, 800), (67, 800)):
        w = random_blocks(rng, kind, n, k)
        assert (w.kind, w.shape) == (kind, (n, k))
        values = values_of(w)
        scales = np.asarray(w.scales, np.float64)
        np.testing.assert_allclose(w.dense(), values, rtol=2e-7, atol=2e-7 * np.abs(scales).max())
        rows = np.array([n - 1, 0, n + 5])
        np.testing.assert_allclose(w.rows(jnp.asarray(rows)), w.dense()[np.minimum(rows, n - 1)])
        for m in (1, 2, 6, 8, 13, 32, 33, 40):
            x = jnp.asarray(rng.standard_normal((m, k)), jnp.float32)
            expected = np.asarray(x, np.float64) @ values.T
            bound = 2.0**-23 * (np.abs(np.asarray(x, np.float64)) @ np.abs(values).T).max() * 4
            np.testing.assert_allclose(linear(x, w, impl=impl), expected, atol=bound)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *get_args(BlockKind)])
def test_a_row_does_not_depend_on_its_company(kind: str):
    rng = np.random.default_rng(2)
    plain = jnp.asarray(rng.standard_normal((67, 800)), kind if "float" in kind else "float32")
    w = plain if "float" in kind else random_blocks(rng, cast(BlockKind, kind), 67, 800)
    x = jnp.asarray(rng.standard_normal((50, 800)), jnp.float32)
    whole = np.asarray(linear(x, w, impl="native"))
    for m in (2, 7, 8, 31, 33):
        np.testing.assert_array_equal(linear(x[:m], w, impl="native"), whole[:m])


def test_blocks_must_divide_a_row():
    with pytest.raises(ValueError, match="40 values do not divide into blocks of 32"):
        BlockWeights.abstract("int4", (2, 40))


def test_symmetric_codes_lose_nothing():
    """Four bits times bfloat16's eight fit into float32: every value, and a product with one of them, is exact."""
    w = random_blocks(np.random.default_rng(3), "int4_symmetric", 5, 64)
    np.testing.assert_array_equal(w.dense(), values_of(w))
    np.testing.assert_array_equal(linear(jnp.eye(64), w, impl="native").T, values_of(w))


@pytest.mark.parametrize("kind", get_args(BlockKind))
def test_leading_axes(kind: BlockKind):
    w = random_blocks(np.random.default_rng(4), kind, 2, 3, 5, 64)
    np.testing.assert_allclose(w.dense(), values_of(w), rtol=1e-6)
    for shape in ((6, 5, 64), (-1, 64), (2, 15, 64)):
        np.testing.assert_array_equal(w.reshape(*shape).dense(), w.dense().reshape(shape))
    with pytest.raises(ValueError, match="rows of 64 values in blocks cannot become rows of 32"):
        w.reshape(-1, 32)


@pytest.mark.parametrize("m", [1, 6, 40])
def test_nan_and_infinity_stay_in_their_row_and_column(m: int):
    x = jnp.ones((m, 32)).at[m // 2, 3].set(jnp.nan)
    w = jnp.ones((70, 32)).at[69, 0].set(jnp.inf)
    result = np.asarray(linear(x, w, impl="native"))
    assert np.isnan(result[m // 2]).all()
    others = np.delete(result, m // 2, axis=0)
    assert (others[:, :69] == 32).all()
    assert np.isinf(others[:, 69]).all()


def test_shapes_it_cannot_do_fall_back_or_are_refused():
    x, w = jnp.ones((2, 20)), jnp.ones((3, 20))
    np.testing.assert_array_equal(linear(x, w), np.full((2, 3), 20))
    with pytest.raises(ValueError, match="cannot do float32"):
        linear(x, w, impl="native")


def test_many_callers_at_once():
    """Several programs on XLA's threads: the kernel's scratch and its parallel loop belong to the caller."""
    rng = np.random.default_rng(1)
    w = jnp.asarray(rng.standard_normal((300, 64)), jnp.bfloat16)
    xs = [jnp.asarray(rng.standard_normal((40, 64)), jnp.float32) for _ in range(32)]
    program = jax.jit(lambda x: linear(x, w, impl="native"))
    results = [program(x) for x in xs]
    for x, result in zip(xs, results, strict=True):
        np.testing.assert_allclose(result, np.asarray(x, np.float64) @ np.asarray(w, np.float64).T, atol=1e-4)
