"""What model code says to the other devices, in terms of logical axes. On one device each of these is nothing at all.

A program that runs on a mesh is traced inside `on_mesh`, in the body of a shard_map; each device then sees its own slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from jaxinfer.errors import ConfigError
from jaxinfer.parallel.mesh import RULES

_mesh: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


@contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """What is traced inside is the program of one device of `mesh`."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def parts(axis: str | None) -> int:
    """Into how many parts a logical axis is cut."""
    mesh = _mesh.get()
    return 1 if mesh is None or axis not in RULES else mesh.shape[RULES[axis]]


def mine(count: int, axis: str) -> int:
    """This device's share of `count` along a logical axis."""
    if count % parts(axis):
        raise ConfigError(f"{count} {axis} do not divide among {parts(axis)} devices")
    return count // parts(axis)


def part_index(axis: str) -> Array | int:
    """Which part is this device's."""
    return jax.lax.axis_index(RULES[axis]) if parts(axis) > 1 else 0


def sum_over(axis: str | tuple[str, ...] | None, x: Array) -> Array:
    """The sum of all parts' x, on each; along several axes at once."""
    axes = (axis,) if isinstance(axis, str) else axis or ()
    split = tuple(RULES[one] for one in axes if parts(one) > 1)
    return jax.lax.psum(x, split) if split else x


def max_over(axis: str, x: Array) -> Array:
    return jax.lax.pmax(x, RULES[axis]) if parts(axis) > 1 else x


def min_over(axis: str, x: Array) -> Array:
    return jax.lax.pmin(x, RULES[axis]) if parts(axis) > 1 else x


def gather_over(axis: str, x: Array) -> Array:
    """All parts' x along a new last dimension, in the order of the parts."""
    if parts(axis) == 1:
        return x[..., None]
    return jax.lax.all_gather(x, RULES[axis], axis=x.ndim)


def swap_over(axis: str, x: Array, give: int, take: int) -> Array:
    """Cuts dimension `give` into a piece for each part, and joins those that it gets along dimension `take`: an all-to-all."""
    if parts(axis) == 1:
        return x
    return jax.lax.all_to_all(x, RULES[axis], split_axis=give, concat_axis=take, tiled=True)
