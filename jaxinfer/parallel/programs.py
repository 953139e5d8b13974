"""Programs over a mesh: each device runs the same function on its own slices (shard_map)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxinfer.parallel.collectives import on_mesh

EVERYWHERE = PartitionSpec()


def jit_on(
    mesh: Mesh | None,
    function: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    donate: tuple[int, ...] = (),
) -> Any:
    """jax.jit(function), on a mesh run by each device on its slices.

    Args:
      in_specs: a PartitionSpec, or a pytree of them, for each argument; unused without a mesh, as is out_specs.
      donate: arguments whose memory the results may take.
    """
    if mesh is None:
        return jax.jit(function, donate_argnums=donate)

    def on_one(*args: Any) -> Any:
        with on_mesh(mesh):
            return function(*args)

    mapped = jax.shard_map(on_one, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate)


def put(value: Any, where: Sharding | None) -> Any:
    """Host arrays where they belong; of several processes, which must give the same values, each fills its own devices."""
    if where is None or where.is_fully_addressable:
        return jax.device_put(value, where)

    def place(array: Any) -> jax.Array:
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    return jax.tree.map(place, value)


def abstract_on(mesh: Mesh | None, shapes: Any, specs: Any) -> Any:
    """Shapes without values, each with its place on the mesh. `specs` may stop at any level above the shapes."""
    if mesh is None:
        return shapes

    def place(spec: PartitionSpec, subtree: Any) -> Any:
        where = NamedSharding(mesh, spec)
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), subtree)

    return jax.tree.map(place, specs, shapes, is_leaf=lambda x: isinstance(x, PartitionSpec))
