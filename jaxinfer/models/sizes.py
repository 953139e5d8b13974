"""How large a model is, read from the declarations of its parameters: nothing is allocated, and no number is written by hand."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.config.model import ModelConfig
from jaxinfer.config.published import KVSize, Sizes
from jaxinfer.errors import CheckpointError
from jaxinfer.models.base import DecoderModel
from jaxinfer.models.decoder import look_of
from jaxinfer.models.params import ParamSpec, param_specs
from jaxinfer.models.registry import Family, family_for, make_tower

# Matrices that quantised checkpoints leave as they are: tables that are looked up, and routers.
_LEFT_ALONE = re.compile(r"(embed_tokens|lm_head|mlp\.gate)\.weight$")


def sizes_of_config(config: Mapping[str, Any]) -> Sizes:
    """Sizes of what a config.json describes. Raises CheckpointError and ConfigError as loading it would."""
    family = family_for(config)
    text = config.get("text_config") or {}
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    return sizes_of(family, family.config_from_hf(config), quantization)


def sizes_of(family: Family, config: ModelConfig, quantization: Mapping[str, Any] | None = None) -> Sizes:
    """Sizes of a model with its vision tower.

    Args:
      quantization: of a checkpoint whose language model is stored in FP8 or INT4: the quantization_config of its config.json.
    """
    dtype = jnp.dtype(config.dtype)
    model, tower = family.model(config, dtype=dtype), make_tower(config, dtype=dtype)
    specs = param_specs(model)
    seen = [] if tower is None else param_specs(tower)
    parameters = _count(specs)
    return Sizes(
        parameters=parameters,
        active=parameters - _idle(specs, model.config),
        vision=_count(seen),
        stored_bytes=_stored_bytes(specs, quantization or {}) + _stored_bytes(seen, {}),
        kv=_kv(model),
    )


def _count(specs: list[ParamSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs)


def _idle(specs: list[ParamSpec], config: ModelConfig) -> int:
    """Parameters of the experts that a token does not go to."""
    if config.moe is None:
        return 0
    experts = _count([spec for spec in specs if spec.axes[0] == "experts"])
    return experts // config.moe.num_experts * (config.moe.num_experts - config.moe.top_k)


def _kv(model: DecoderModel) -> tuple[KVSize, ...]:
    layout, config = model.cache_layout, model.config
    layer = layout.planes * layout.kv_heads * layout.head_dim * jnp.dtype(jnp.bfloat16).itemsize
    looks = Counter(look_of(config, i) for i in range(config.num_layers))
    return tuple(KVSize(look.kind, look.span, count, count * layer) for look, count in looks.items())


def _stored_bytes(specs: list[ParamSpec], quantization: Mapping[str, Any]) -> int:
    method = quantization.get("quant_method")
    if method not in (None, "fp8", "compressed-tensors"):
        raise CheckpointError(f"quant_method {method!r} is not supported; known: fp8, compressed-tensors")
    return sum(_spec_bytes(spec, method, quantization) for spec in specs)


def _spec_bytes(spec: ParamSpec, method: str | None, quantization: Mapping[str, Any]) -> int:
    assert isinstance(spec.value, jax.ShapeDtypeStruct)  # not kept in blocks
    tensors = list(zip(spec.sources, spec.source_shapes, strict=True))
    # Hundreds of experts are stored alike: those of the first stand for them.
    alike = spec.shape[0] if spec.axes[0] == "experts" and len(tensors) > 1 else 1
    total = 0
    for name, shape in tensors[: len(tensors) // alike]:
        if method is None or not _is_quantised(name, shape, quantization):
            total += math.prod(shape) * spec.value.dtype.itemsize
        elif method == "fp8":
            total += _fp8_bytes(shape, quantization)
        else:
            total += _int4_bytes(shape, quantization)
    return total * alike


def _is_quantised(name: str, shape: tuple[int, ...], quantization: Mapping[str, Any]) -> bool:
    if len(shape) != 2 or _LEFT_ALONE.search(name):
        return False
    return not any(_names(entry, name.removesuffix(".weight")) for entry in quantization.get("ignore") or ())


def _names(entry: str, module: str) -> bool:
    """Whether an entry of compressed-tensors' "ignore" means a module: a name, or a pattern after "re:"."""
    pattern = entry.removeprefix("re:")
    return re.match(pattern, module) is not None if pattern != entry else entry == module


def _fp8_bytes(shape: tuple[int, ...], quantization: Mapping[str, Any]) -> int:
    """A byte a value, and a float32 scale for each block."""
    block = quantization["weight_block_size"]
    blocks = math.prod(-(-n // b) for n, b in zip(shape, block, strict=True))
    return math.prod(shape) + 4 * blocks


def _int4_bytes(shape: tuple[int, ...], quantization: Mapping[str, Any]) -> int:
    """Half a byte a value, a bfloat16 scale for each group, and two numbers for the shape."""
    (group,) = {g["weights"]["group_size"] for g in quantization["config_groups"].values()}
    values = math.prod(shape)
    return values // 2 + 2 * values // group + 2 * 4
