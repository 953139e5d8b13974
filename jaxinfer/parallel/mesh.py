"""The device mesh, and which of its axes splits which logical axis of a parameter.

Logical axes are what model code names: "vocab", "heads", "ffn", "experts", "embed"; "lanes" is a cache's: pages of other
sequences on each device. Mesh axes are named here alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config.mesh import MeshConfig
from jaxinfer.errors import ConfigError

DATA, PIPE, EXPERT, TENSOR = "data", "pipe", "expert", "tensor"
RULES = {"vocab": TENSOR, "heads": TENSOR, "ffn": TENSOR, "lanes": TENSOR, "experts": EXPERT}


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over the first devices of each process, neighbours along the tensor axis first. ConfigError when there are too few."""
    found = _equal_shares(jax.devices() if devices is None else devices, config.num_devices)
    if len(found) < config.num_devices:
        raise ConfigError(
            f"dp={config.dp} x pp={config.pp} x ep={config.ep} x tp={config.tp} needs {config.num_devices} devices, "
            f"there are {len(found)} ({found[0].device_kind if found else 'none'})"
        )
    shape = (config.dp, config.pp, config.ep, config.tp)
    return Mesh(np.array(found[: config.num_devices]).reshape(shape), (DATA, PIPE, EXPERT, TENSOR))


def stage_meshes(mesh: Mesh | None) -> list[Mesh | None]:
    """The devices of each pipeline stage; None: one device, and so one stage."""
    if mesh is None:
        return [None]
    pipe = mesh.axis_names.index(PIPE)
    return [Mesh(devices, mesh.axis_names) for devices in np.split(mesh.devices, mesh.shape[PIPE], pipe)]


def pair_of(source: Mesh, target: Mesh) -> Mesh:
    """Two stages' devices as one mesh."""
    pipe = source.axis_names.index(PIPE)
    return Mesh(np.concatenate([source.devices, target.devices], pipe), source.axis_names)


def replica_meshes(config: MeshConfig) -> list[Mesh]:
    """A mesh for each of `dp` copies. ConfigError when there are too few devices."""
    devices = make_mesh(config).devices  # [dp, pp, ep, tp]
    return [Mesh(devices[i : i + 1], (DATA, PIPE, EXPERT, TENSOR)) for i in range(config.dp)]


def _equal_shares(devices: Sequence[Any], count: int) -> list[Any]:
    """The devices, but of several processes' only as many of each as it has to give for `count`."""
    by_process: defaultdict[int, list[Any]] = defaultdict(list)
    for device in devices:
        by_process[device.process_index].append(device)
    share = None if len(by_process) == 1 else count // len(by_process)
    return [device for index in sorted(by_process) for device in by_process[index][:share]]


def partition(axes: Sequence[str | None], name: str) -> PartitionSpec:
    """How an array whose dimensions have these logical axes is split. ConfigError when two of them want one mesh axis."""
    wanted = defaultdict(list)
    for axis in axes:
        if axis in RULES:
            wanted[RULES[axis]].append(axis)
    for mesh_axis, logical in wanted.items():
        if len(logical) > 1:
            raise ConfigError(
                f"{name}: logical axes {' and '.join(map(repr, logical))} are both split over {mesh_axis!r}"
            )
    return PartitionSpec(*(RULES.get(axis or "") for axis in axes))


def sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int], name: str) -> NamedSharding:
    """Where an array's slices go. ConfigError when a dimension does not divide among the devices of its axis."""
    split = partition(axes, name)
    for size, logical, axis in zip(shape, axes, split, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ConfigError(
                f"{name}: {size} {logical} do not divide among {mesh.shape[axis]} devices of the {axis!r} axis"
            )
    return NamedSharding(mesh, split)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
