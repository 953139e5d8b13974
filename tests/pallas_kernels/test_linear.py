"""Linear products against float64, by every implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.linear import linear


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
