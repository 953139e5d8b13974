"""What XLA keeps in a GPU's memory between layers of our operations."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.network

ROOT = Path(__file__).parents[2]
# Prints the temporaries of stacks of 2 and of 8 layers.
PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxinfer.parallel.topology import topology
from pallas_kernels.grouped_linear import grouped_linear
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.paged_attention import paged_attention

where = SingleDeviceSharding(topology("h100").devices()[0])

def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=where)

def stack(layer, layers, x, *rest):
    def run(x, *rest):
        for _ in range(layers):
            x = jnp.tanh(layer(x, *rest)).astype(x.dtype)
        return x
    return jax.jit(run).lower(x, *rest).compile().memory_analysis().temp_size_in_bytes

ints = jnp.int32
grouped = lambda x, sizes, weight: grouped_linear(x, weight, sizes)
experts = shape(2048, 512), shape(8, dtype=ints), shape(8, 512, 512)
paged = lambda q, *rest: paged_attention(q, *rest, scale=1.0)
tables = shape(32, 64, dtype=ints), shape(32, dtype=ints), shape(32, dtype=ints)
attention = shape(32, 64, 8, 128), shape(2, 2, 1024, 16, 128), *tables
latent = lambda q, *rest: mla_attention(q, *rest, scale=1.0)[..., :64].repeat(3, axis=-1)
mla = shape(32, 1, 16, 192), shape(1, 1, 1024, 16, 576), *tables, shape(16, 256, 512)
for layer, args in (grouped, experts), (paged, attention), (latent, mla):
    print(*(stack(layer, layers, *args) for layers in (2, 8)))
"""


def test_temporaries_do_not_grow_with_the_layers(gpu_python: str):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [gpu_python, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(sizes) == 3
    assert all(eight < 1.1 * two for two, eight in sizes), sizes
