"""Collectives are found in what XLA really makes of a program, loops included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.parallel.hlo import Collective, collectives


def found_in(function, *shapes: tuple[int, ...]) -> dict[tuple[str, str], int]:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    spread = PartitionSpec(("a", "b"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)
    values = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(mapped).lower(*values).compile().as_text()
    assert text is not None
    return {(c.kind, c.shape): count for c, count in collectives(text).items()}


def test_each_kind_with_the_shape_of_its_result():
    def run(x):
        y = jax.lax.psum(x, "b")
        z = jax.lax.all_gather(y * 2, "a")
        w = jax.lax.ppermute(jnp.sin(x), "b", [(0, 1), (1, 0)])
        return y + z.sum(axis=0) + w

    assert found_in(run, (8, 6)) == {
        ("all-reduce", "f32[2,6]"): 1,
        ("all-gather", "f32[2,2,6]"): 1,
        ("collective-permute", "f32[2,6]"): 1,
    }


def test_no_exchange_is_found_where_there_is_none():
    assert found_in(jnp.sin, (8, 6)) == {}


def test_a_loop_counts_as_often_as_it_turns():
    def run(x):
        def outer(i, x):
            return jax.lax.fori_loop(0, 5, lambda j, x: jnp.sin(jax.lax.psum(x, "a")), x) + i

        return jax.lax.fori_loop(0, 3, outer, x)

    assert found_in(run, (8, 6)) == {("all-reduce", "f32[2,6]"): 15}


def test_started_and_finished_is_one_exchange_of_the_result():
    text = """\
%add (x: bf16[], y: bf16[]) -> bf16[] {
  ROOT %sum = bf16[] add(%x, %y)
}

ENTRY %main (p: bf16[64,8192]) -> bf16[64,8192] {
  %ar = ((bf16[64,8192]{1,0}), bf16[64,8192]{1,0}) all-reduce-start(%p), channel_id=1, replica_groups=mesh['data'=1,'tensor'=8] {'tensor'}, to_apply=%add
  ROOT %done = bf16[64,8192]{1,0} all-reduce-done(%ar), metadata={op_name="psum"}
}
"""
    expected = Collective("all-reduce", "bf16[64,8192]", "tensor", 2 * 64 * 8192)
    assert collectives(text) == {expected: 1}
