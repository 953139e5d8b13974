"""From one stage's devices to another's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.parallel.mesh import PIPE, pair_of


class Link:
    """Sends arrays that every device of a stage holds whole: each device to its counterpart, in one collective-permute.

    The program runs on both stages' devices, so that both must start it, and in the same order as others that they share.
    """

    def __init__(self, source: Mesh, target: Mesh):
        self._source, self._target = set(source.devices.flat), set(target.devices.flat)
        self._pair = NamedSharding(pair_of(source, target), PartitionSpec(PIPE))
        self._arrived = NamedSharding(target, PartitionSpec())
        self._programs: dict[tuple[tuple[int, ...], Any], Any] = {}
        # What stands on the receiving devices in place of an array to send.
        self._rooms: dict[tuple[tuple[int, ...], Any], list[jax.Array]] = {}

    def send(self, x: jax.Array) -> jax.Array:
        """x on every device of the other stage."""
        room = self._rooms.get((x.shape, x.dtype))
        if room is None:
            zeros = jax.device_put(np.zeros(x.shape, x.dtype), self._arrived)
            room = self._rooms[x.shape, x.dtype] = [s.data for s in zeros.addressable_shards]
        parts = [s.data for s in x.addressable_shards if s.device in self._source]
        both = jax.make_array_from_single_device_arrays(_doubled(x.shape), self._pair, parts + room)
        shards = self.program(x.shape, x.dtype)(both).addressable_shards
        parts = [s.data for s in shards if s.device in self._target]
        return jax.make_array_from_single_device_arrays(x.shape, self._arrived, parts)

    def program(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """The compiled program that sends arrays of this kind."""
        key = (shape, jnp.dtype(dtype))
        if key not in self._programs:
            value = jax.ShapeDtypeStruct(_doubled(shape), dtype, sharding=self._pair)
            send = jax.shard_map(
                lambda x: jax.lax.ppermute(x, PIPE, [(0, 1)]),
                mesh=self._pair.mesh,
                in_specs=self._pair.spec,
                out_specs=self._pair.spec,
                check_vma=False,
            )
            self._programs[key] = jax.jit(send).lower(value).compile()
        return self._programs[key]


def _doubled(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (2 * shape[0], *shape[1:])
