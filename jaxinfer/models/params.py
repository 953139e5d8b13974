"""Parameters declared once. Loading, random initialisation, sharding, packing and planning all read this declaration.

A module makes its parameters with `declare`: an `nnx.Param` that holds a `jax.ShapeDtypeStruct` and, as metadata,
where the value comes from and how its axes are called. Nothing is allocated until a loader fills the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels.linear import BlockKind, BlockWeights

Axis = str | None


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of a model.

    Attributes:
      path: where it sits in the module tree, e.g. ("layers", 0, "attention", "qkv", "weight").
      sources: names of its tensors in a Hugging Face checkpoint; several follow each other along axis 0.
      source_shapes: the shape of each of them.
      transposed: the checkpoint stores the tensors with their last two axes swapped.
      groups: the tensors are cut into so many parts along axis 0, and the first parts of all come first, then the second ones.
      value: the parameter as shapes without values, what a program is compiled for.
      axes: logical axis names, one a dimension; jaxinfer.parallel maps them to mesh axes.
      init: how random weights are drawn.
    """

    path: tuple[Any, ...]
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    transposed: bool
    groups: int
    value: jax.ShapeDtypeStruct | BlockWeights
    axes: tuple[Axis, ...]
    init: Literal["normal", "ones", "zeros"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


def declare(
    sources: dict[str, tuple[int, ...]],
    *,
    axes: tuple[Axis, ...],
    dtype: DTypeLike,
    init: Literal["normal", "ones", "zeros"] = "normal",
    shape: tuple[int, ...] | None = None,
    transposed: bool = False,
    groups: int = 1,
) -> nnx.Param:
    """Declares a parameter made of checkpoint tensors {name: shape}, one after the other along axis 0 when there are several.

    Args:
      shape: what the result is reshaped to, e.g. [experts, out, in] for as many matrices; None: as it comes.
      transposed: the checkpoint swaps the last two axes of each tensor; the shapes in `sources` are the checkpoint's.
      groups: see ParamSpec; so that a split along axis 0 leaves whole groups together.
    """
    swapped = [(*s[:-2], s[-1], s[-2]) if transposed else tuple(s) for s in sources.values()]
    if any(s[1:] != swapped[0][1:] for s in swapped):
        raise ValueError(f"tensors that are stacked must agree after axis 0: {sources}")
    if any(s[0] % groups for s in swapped):
        raise ValueError(f"{groups} groups do not divide the rows of {sources}")
    joined = (sum(s[0] for s in swapped), *swapped[0][1:])
    shape = joined if shape is None else shape
    if math.prod(shape) != math.prod(joined):
        raise ValueError(f"tensors of shape {joined} in all cannot become {shape}: {tuple(sources)}")
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} axis names for shape {shape} of {tuple(sources)}")
    value = jax.ShapeDtypeStruct(shape, dtype)
    return nnx.Param(
        value,
        sources=tuple(sources),
        source_shapes=tuple(map(tuple, sources.values())),
        transposed=transposed,
        groups=groups,
        axes=axes,
        init=init,
    )


def param_specs(model: nnx.Module) -> list[ParamSpec]:
    """Every declared parameter of a model, in the order of `jax.tree.leaves(nnx.state(model))`."""
    specs = []
    for path, var in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value, meta = var.get_value(), var.get_metadata()
        specs.append(
            ParamSpec(
                path=tuple(path),
                sources=meta["sources"],
                source_shapes=meta["source_shapes"],
                transposed=meta["transposed"],
                groups=meta["groups"],
                value=value,
                axes=meta["axes"],
                init=meta["init"],
            )
        )
    return specs


def keep_blocks(model: nnx.Module, kind_of: Callable[[str], BlockKind | None]) -> int:
    """Declares that matrices stay in the blocks of codes their tensors are stored in; returns how many do.

    Only the matrices that modules multiply with are asked about. Tensors stacked into one parameter must agree in kind;
    otherwise it remains a plain array, as does one that the checkpoint stores transposed: its blocks lie along the other axis.

    Args:
      kind_of: how the checkpoint stores a tensor, None for plain numbers and for blocks that BlockWeights cannot hold.
    """
    kept = 0
    for _, module in nnx.iter_modules(model):
        weight = getattr(module, "weight", None) if getattr(module, "TAKES_BLOCKS", False) else None
        if weight is None or weight.get_metadata()["transposed"]:
            continue
        kinds: set[BlockKind | None] = {kind_of(source) for source in weight.get_metadata()["sources"]}
        kind: BlockKind | None = next(iter(kinds)) if len(kinds) == 1 else None
        if kind is not None:
            weight.set_value(BlockWeights.abstract(kind, weight.get_value().shape))
            kept += 1
    return kept
