"""Fills a model's declared parameters from a checkpoint, and insists that nothing is missing or left over."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import ml_dtypes
import numpy as np

from jaxinfer.errors import CheckpointError
from jaxinfer.models.base import DecoderModel
from jaxinfer.models.params import ParamSpec, param_specs
from jaxinfer.models.vision.tower import VisionTower
from jaxinfer.parallel.programs import put
from jaxinfer.weights.checkpoint import Checkpoint, Params, ShardingOf, Task
from jaxinfer.weights.layout import pieces, swapped
from jaxinfer.weights.progress import LoadProgress
from pallas_kernels.linear import BlockWeights

logger = logging.getLogger(__name__)

_FLOATS = (np.dtype(ml_dtypes.bfloat16), *map(np.dtype, (np.float16, np.float32, np.float64)))
# Endings of tensors that some converters write and no model needs.
_DERIVED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
_COMPARED_ROWS = 32  # of a tied head's copy
_ALIGNMENT = 64  # bytes; what XLA wants of an array that it is to use where it lies


def load_params(
    model: DecoderModel,
    checkpoint: Checkpoint,
    sharding_of: ShardingOf | None = None,
    *,
    tower: VisionTower | None = None,
) -> Params:
    """The parameters of the model, then of its vision tower, on the device, each in the order of `param_specs`.

    Several threads read; host memory peaks near the largest parameter above the weights. On CPU the arrays that were read
    become the parameters themselves.

    Args:
      sharding_of: where each parameter goes, every device its own slice; None: all to the default device.
    Raises:
      CheckpointError: before anything is read, when a tensor is missing, has another shape, is not of floating-point numbers,
        or has no place in the model; the head's tensor is ignored where it is tied to the embeddings.
    """
    specs = param_specs(model) + ([] if tower is None else param_specs(tower))
    check_names(model, specs, checkpoint)
    for spec in specs:
        check_tensors(spec, checkpoint)
    _warn_of_ignored_head(model, checkpoint)
    restored = checkpoint.restore(specs, sharding_of)
    if restored is not None:
        return restored
    # On CPU what is read becomes the parameter; elsewhere it is needed until it is copied.
    stays = jax.default_backend() == "cpu" and sharding_of is None
    budget = math.inf if stays else max(map(num_bytes, specs))
    params = []
    with LoadProgress(sum(map(num_bytes, specs))) as progress:
        for spec, value in zip(specs, _read_ahead(specs, checkpoint, budget), strict=True):
            # Waiting for the copy keeps few of them on the host; the threads read on meanwhile.
            params.append(jax.block_until_ready(put(value, sharding_of and sharding_of(spec))))
            progress.add(num_bytes(spec))
    return tuple(params)


def check_names(model: DecoderModel, specs: list[ParamSpec], checkpoint: Checkpoint) -> None:
    """Raises CheckpointError unless the checkpoint holds the model's tensors and no others."""
    used = {source for spec in specs for source in spec.sources}
    present = checkpoint.names()
    missing = sorted(used - present)
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(missing)} of {len(used)} tensors, first {missing[0]!r}: the checkpoint is incomplete"
        )
    tied = set(_tied_head(model)[:1])
    unused = model.unused_tensors
    extra = sorted(
        name
        for name in present - used - tied
        if not name.endswith(_DERIVED) and not (unused and unused.match(name))
    )
    if extra:
        raise CheckpointError(
            f"{checkpoint.path} holds {len(extra)} tensors that a {checkpoint.config.get('model_type')} model has no place for, "
            f"first {extra[0]!r}: its config.json does not describe it"
        )


def check_tensors(spec: ParamSpec, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError unless a parameter's tensors have the declared shapes and hold floating-point numbers."""
    for source, shape in zip(spec.sources, spec.source_shapes, strict=True):
        stored = checkpoint.shape(source)
        if stored != shape:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {source!r} has shape {stored}, but the config asks for {shape}"
            )
        dtype = checkpoint.dtype(source)
        if dtype not in _FLOATS:
            known = ", ".join(str(d) for d in _FLOATS)
            raise CheckpointError(
                f"{checkpoint.path}: tensor {source!r} is {dtype}, but weights are {known}, or as quantization_config says"
            )


def _warn_of_ignored_head(model: DecoderModel, checkpoint: Checkpoint) -> None:
    """Logs that a head is stored beside the embeddings it is tied to and is no copy of them: the config may be wrong.

    Some rows are compared, not all: a head of its own differs in each.
    """
    names = _tied_head(model)
    if not names or names[0] not in checkpoint.names():
        return
    head, embed = names
    same = checkpoint.shape(head) == checkpoint.shape(embed)
    if same:
        rows, width = checkpoint.shape(embed)
        both = np.empty((2, 1, width), np.float32)
        for start in range(0, rows, max(1, rows // _COMPARED_ROWS)):
            for name, out in zip(names, both, strict=True):
                for task in checkpoint.fill(name, out, start):
                    task()
            same = same and np.array_equal(*both, equal_nan=True)
    if not same:
        logger.warning(
            "%s: %r is ignored, though it is not a copy of %r, because tie_word_embeddings is true: "
            "set it to false in config.json if the model has a head of its own",
            checkpoint.path,
            head,
            embed,
        )


def _tied_head(model: DecoderModel) -> tuple[str, ...]:
    """Names of the head and of the embeddings it is tied to; none where it is not."""
    prefix = model.config.tensor_prefix
    names = (f"{prefix}lm_head.weight", f"{prefix}model.embed_tokens.weight")
    return names if model.config.tie_word_embeddings else ()


def num_bytes(spec: ParamSpec) -> int:
    """What a parameter takes in memory."""
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in jax.tree.leaves(spec.value))


def _read_ahead(
    specs: list[ParamSpec], checkpoint: Checkpoint, budget: float
) -> Iterator[np.ndarray | BlockWeights]:
    """Each parameter's values in turn, and as many of the next ones are read meanwhile as take up to `budget` bytes."""
    pool = ThreadPoolExecutor(max(4, len(os.sched_getaffinity(0))), "weights")
    ahead: deque[tuple[np.ndarray | BlockWeights, list[Future[None]], int]] = deque()
    held = 0

    def finish() -> np.ndarray | BlockWeights:
        value, futures, _ = ahead.popleft()
        for future in futures:
            future.result()
        return value

    try:
        for spec in specs:
            size = num_bytes(spec)
            while ahead and held + size > budget:
                held -= ahead[0][2]
                yield finish()
            value = jax.tree.map(_allocate, spec.value)
            ahead.append((value, [pool.submit(task) for task in _tasks(spec, value, checkpoint)], size))
            held += size
        while ahead:
            yield finish()
    finally:
        pool.shutdown(cancel_futures=True)


def _allocate(part: jax.ShapeDtypeStruct) -> np.ndarray:
    dtype = np.dtype(part.dtype)
    size = math.prod(part.shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(part.shape)


def _tasks(spec: ParamSpec, value: np.ndarray | BlockWeights, checkpoint: Checkpoint) -> list[Task]:
    """Work that fills a parameter from its tensors."""
    if isinstance(value, BlockWeights):
        return _block_tasks(spec, value, checkpoint)
    tasks: list[Task] = []
    if spec.transposed:
        for i, start, out in pieces(value, [swapped(s) for s in spec.source_shapes], spec.groups):
            assert out.ndim > 2 or spec.groups == 1  # else they would be groups of columns
            tasks += checkpoint.fill(spec.sources[i], out.swapaxes(-1, -2), start)
    else:
        for i, start, out in pieces(value, spec.source_shapes, spec.groups):
            tasks += checkpoint.fill(spec.sources[i], out, start)
    return tasks


def _block_tasks(spec: ParamSpec, value: BlockWeights, checkpoint: Checkpoint) -> list[Task]:
    tasks: list[Task] = []
    kind = checkpoint.block_kind(spec.sources[0])
    assert kind is not None  # keep_blocks has asked
    stored = [BlockWeights.abstract(kind, shape) for shape in spec.source_shapes]
    parts = [
        pieces(part, [tensor[field].shape for tensor in stored], spec.groups)
        for field, part in enumerate(value)
    ]
    for codes, *scales in zip(*parts, strict=True):
        out = BlockWeights(codes.values, *(piece.values for piece in scales))
        tasks += checkpoint.fill_blocks(spec.sources[codes.tensor], out, codes.start)
    return tasks
