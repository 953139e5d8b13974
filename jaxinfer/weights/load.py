"""Fills a model's declared parameters from a checkpoint, one at a time, and insists that nothing is missing or left over."""

from __future__ import annotations

import re

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from jaxinfer.errors import CheckpointError
from jaxinfer.models.params import ParamSpec, param_specs
from jaxinfer.weights.checkpoint import Checkpoint
from pallas_kernels.linear import BlockWeights

Params = tuple[jax.Array | BlockWeights, ...]

# Tensors that some converters write and no model needs.
_DERIVED = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias|attn\.bias)$")


def load_params(model: nnx.Module, checkpoint: Checkpoint) -> Params:
    """The model's parameters on the device, in the order of `param_specs(model)`.

    Host memory peaks near the largest parameter above the weights. Raises CheckpointError when a tensor is missing,
    has another shape, or has no place in the model; a copy of tied embeddings under the head's name is ignored.
    """
    specs = param_specs(model)
    used = {source for spec in specs for source in spec.sources}
    present = checkpoint.names()
    missing = sorted(used - present)
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(missing)} of {len(used)} tensors, first {missing[0]!r}: the checkpoint is incomplete"
        )
    ignored = {"lm_head.weight"} if checkpoint.config.get("tie_word_embeddings") else set()
    extra = sorted(n for n in present - used - ignored if not _DERIVED.match(n))
    if extra:
        raise CheckpointError(
            f"{checkpoint.path} holds {len(extra)} tensors that a {checkpoint.config.get('model_type')} model has no place for, "
            f"first {extra[0]!r}: its config.json does not describe it"
        )
    return tuple(jax.device_put(_read(spec, checkpoint)) for spec in specs)


def _read(spec: ParamSpec, checkpoint: Checkpoint) -> np.ndarray | BlockWeights:
    for source, shape in zip(spec.sources, spec.source_shapes, strict=True):
        stored = checkpoint.shape(source)
        if stored != shape:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {source!r} has shape {stored}, but the config asks for {shape}"
            )
    if isinstance(spec.value, BlockWeights):
        parts = [checkpoint.read_blocks(source) for source in spec.sources]
        return BlockWeights(*(np.concatenate(field) for field in zip(*parts, strict=True)))
    value = np.empty(spec.shape, np.dtype(spec.value.dtype))
    row = 0
    for source, shape in zip(spec.sources, spec.source_shapes, strict=True):
        tensor = checkpoint.read(source)
        if not _is_float(tensor.dtype):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {source!r} is {tensor.dtype}, not a floating-point type"
            )
        value[row : row + shape[0]] = tensor  # casts
        row += shape[0]
    return value


def _is_float(dtype: np.dtype) -> bool:
    return np.issubdtype(dtype, np.floating) or dtype == ml_dtypes.bfloat16
