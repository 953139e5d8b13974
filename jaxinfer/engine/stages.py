"""A model's pipeline stages: which layers each has, on which devices, with which parameters and how much of the KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxinfer import compat
from jaxinfer.config.engine import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.kv.cache import CacheSpec
from jaxinfer.kv.manager import pages_for_one
from jaxinfer.models.base import DecoderModel
from jaxinfer.models.params import ParamSpec, param_specs
from jaxinfer.parallel.collectives import on_mesh, parts
from jaxinfer.parallel.mesh import sharding, stage_meshes
from jaxinfer.parallel.stages import Stage, cut_layers
from jaxinfer.weights.load import Params, num_bytes

_KV_DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
_CPU_KV_BYTES = 2**30
_GPU_KV_SHARE = 0.9  # of the memory that weights leave free


@dataclass(frozen=True, slots=True)
class ModelStage:
    """One stage, or a whole model where there is one alone.

    Attributes:
      mesh: its devices; None: one, the default.
    """

    model: DecoderModel
    mesh: Mesh | None
    cache: CacheSpec


def make_stages(
    make: Callable[..., DecoderModel],
    whole: DecoderModel,
    mesh: Mesh | None,
    engine: EngineConfig,
    served: Any,
) -> list[ModelStage]:
    """The stages of a model, about equally slow.

    Args:
      make: makes `whole`, and with stage=… the module of one stage.
      mesh: of all devices.
    Raises:
      ConfigError: there are more stages than layers.
    """
    meshes = stage_meshes(mesh)
    count = len(meshes)
    if count == 1:
        return [ModelStage(whole, mesh, cache_spec(whole, engine, served))]
    costs, head = decode_bytes(whole, max(1, engine.max_num_seqs // count))
    bounds = cut_layers(costs, count, last=head)
    models = [make(stage=Stage(i, bounds)) for i in range(count)]
    return [
        ModelStage(model, devices, cache_spec(model, engine, served))
        for model, devices in zip(models, meshes, strict=True)
    ]


def decode_bytes(model: DecoderModel, rows: int) -> tuple[list[float], float]:
    """Weights that a decode step of so many rows reads: bytes of each layer, and of the head.

    Of a mixture's experts those that rows are expected to choose, were all equally likely.
    """
    config = model.config
    layers = [0.0] * config.num_layers
    for spec in param_specs(model):
        share = 1.0
        if "experts" in spec.axes and config.moe is not None:
            share = 1 - (1 - config.moe.top_k / config.moe.num_experts) ** rows
        if spec.path[0] == "layers":
            layers[spec.path[1]] += num_bytes(spec) * share
    return layers, float(sum(map(num_bytes, param_specs(model.output_head)))) if model.output_head else 0.0


def placement(stages: Sequence[ModelStage]) -> Callable[[ParamSpec], NamedSharding] | None:
    """Where each parameter goes: to the first stage that has it, a vision tower's to the first of all. None: one device."""
    if stages[0].mesh is None:
        return None
    owners: dict[tuple[str, ...], Mesh | None] = {}
    for stage in stages:
        for spec in param_specs(stage.model):
            owners.setdefault(spec.sources, stage.mesh)

    def place(spec: ParamSpec) -> NamedSharding:
        mesh = owners.get(spec.sources, stages[0].mesh)
        assert mesh is not None
        return sharding(mesh, spec.axes, spec.shape, spec.sources[0])

    return place


def stage_params(stages: Sequence[ModelStage], whole: DecoderModel, params: Params) -> list[Params]:
    """Each stage's part of a model's parameters. Tied embeddings are on the first stage and, a copy, on the last."""
    if len(stages) == 1:
        return [params[: len(param_specs(whole))]]
    values = {spec.sources: value for spec, value in zip(param_specs(whole), params, strict=False)}
    place = placement(stages)
    assert place is not None
    parts = []
    for stage in stages:
        assert stage.mesh is not None
        own = []
        for spec in param_specs(stage.model):
            value = values[spec.sources]
            if place(spec).mesh != stage.mesh:
                value = jax.device_put(value, sharding(stage.mesh, spec.axes, spec.shape, spec.sources[0]))
            own.append(value)
        parts.append(tuple(own))
    return parts


def cache_spec(module: DecoderModel, engine: EngineConfig, served: Any) -> CacheSpec:
    """Shape of the KV cache."""
    name = str(served) if engine.kv_dtype == "auto" else engine.kv_dtype
    if name not in _KV_DTYPES:
        raise ConfigError(
            f"kv_dtype {name!r} is not supported; choose auto or one of {', '.join(_KV_DTYPES)}"
        )
    return CacheSpec(
        **dataclasses.asdict(module.cache_layout),
        page_size=engine.page_size,
        dtype=jnp.dtype(name),
    )


def count_lanes(stages: Sequence[ModelStage]) -> int:
    """Parts in which devices keep the cache, each of other sequences: of latents, which belong to all heads, one a device."""
    if stages[0].mesh is None or stages[0].model.config.mla is None or len(stages) > 1:
        return 1
    with on_mesh(stages[0].mesh):
        return parts("lanes")


def choose_num_pages(engine: EngineConfig, stages: Sequence[ModelStage], lanes: int = 1) -> int:
    """Pages that fit the memory asked for, at least one longest sequence's and at most what all slots could use.

    Every stage has its part of every page. Of several lanes each has so many; what was asked for is of all of them.
    """
    groups = stages[0].model.page_groups
    sizes = [stage.cache.bytes_per_page for stage in stages]
    one = pages_for_one(engine.max_model_len, engine.max_prefill_tokens, engine.page_size, groups)
    if engine.num_pages is not None:
        given, name = engine.num_pages // lanes, f"num_pages={engine.num_pages}"
    elif engine.kv_cache_bytes is not None:
        given = engine.kv_cache_bytes // sum(sizes) // lanes
        name = f"kv_cache_bytes={engine.kv_cache_bytes} ({given} pages)"
    else:
        # On CPU the stages share one memory, elsewhere each has its own.
        free = min(compat.free_memory(stage.mesh) for stage in stages)
        if compat.platform() == "cpu":
            fit = min(_CPU_KV_BYTES, free // 2) // sum(sizes) // lanes
        else:
            fit = int(free * _GPU_KV_SHARE) // max(sizes)
        return min(max(fit, one + 1), one * -(-engine.max_num_seqs // lanes) + 1)
    if given < one + 1:
        raise ConfigError(
            f"{name} is less than the {one + 1} pages of {sum(sizes)} bytes{f' on each of {lanes} devices' * (lanes > 1)} that one sequence of "
            f"max_model_len={engine.max_model_len} needs: raise it or lower max_model_len"
        )
    return given
