"""RMSNorm against float64, by every implementation, and that rows do not know of each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import rms_norm


@pytest.mark.parametrize("impl", ["reference", "native", "auto"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (70, 576), (2, 5, 64)])
def test_equals_the_definition(impl: str, weights: str, shape: tuple[int, ...]):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(shape) * 3, jnp.float32)
    w = jnp.asarray(rng.standard_normal(shape[-1]), weights)
    x64 = np.asarray(x, np.float64)
    expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(w, np.float64)
    result = rms_norm(x, w, eps=1e-5, impl=impl)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=2e-6, atol=1e-7)


def test_a_row_s_bits_do_not_depend_on_the_others():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((200, 576)), jnp.float32)
    program = jax.jit(lambda x: rms_norm(x, jnp.ones(576), eps=1e-6))
    whole = np.asarray(program(x))
    for rows in (1, 2, 7, 8, 60):
        np.testing.assert_array_equal(program(x[:rows]), whole[:rows])


def test_what_the_kernel_cannot_do():
    x = jnp.ones((2, 20), jnp.bfloat16)
    assert rms_norm(x, jnp.ones(20, jnp.bfloat16), eps=1e-5).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="cannot do bfloat16"):
        rms_norm(x, jnp.ones(20), eps=1e-5, impl="native")
