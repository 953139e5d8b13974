"""Parameters declared once. Loading, random initialisation, sharding, packing and planning all read this declaration.

A module makes its parameters with `declare`: an `nnx.Param` that holds a `jax.ShapeDtypeStruct` and, as metadata,
where the value comes from and how its axes are called. Nothing is allocated until a loader fills the state.
"""

from __future__ import annotations

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
      sources: names of its tensors in a Hugging Face checkpoint; several are stacked along axis 0.
      source_shapes: the shape of each of them.
      value: the parameter as shapes without values, what a program is compiled for.
      axes: logical axis names, one a dimension; jaxinfer.parallel maps them to mesh axes.
      init: how random weights are drawn.
    """

    path: tuple[Any, ...]
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]
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
) -> nnx.Param:
    """Declares a parameter made of checkpoint tensors {name: shape}, stacked along axis 0 when there are several."""
    first, *others = sources.values()
    if any(s[1:] != first[1:] for s in others):
        raise ValueError(f"tensors that are stacked must agree after axis 0: {sources}")
    shape = (sum(s[0] for s in sources.values()), *first[1:])
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} axis names for shape {shape} of {tuple(sources)}")
    value = jax.ShapeDtypeStruct(shape, dtype)
    return nnx.Param(
        value, sources=tuple(sources), source_shapes=tuple(map(tuple, sources.values())), axes=axes, init=init
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
                value=value,
                axes=meta["axes"],
                init=meta["init"],
            )
        )
    return specs


def keep_blocks(model: nnx.Module, kind_of: Callable[[str], BlockKind | None]) -> int:
    """Declares that matrices stay in the blocks of codes their tensors are stored in; returns how many do.

    Only the matrices that modules multiply with are asked about. Tensors stacked into one parameter must agree in kind;
    otherwise it remains a plain array.

    Args:
      kind_of: how the checkpoint stores a tensor, None for plain numbers and for blocks that BlockWeights cannot hold.
    """
    kept = 0
    for _, module in nnx.iter_modules(model):
        weight = getattr(module, "weight", None) if getattr(module, "TAKES_BLOCKS", False) else None
        if weight is None:
            continue
        kinds: set[BlockKind | None] = {kind_of(source) for source in weight.get_metadata()["sources"]}
        kind: BlockKind | None = next(iter(kinds)) if len(kinds) == 1 else None
        if kind is not None:
            weight.set_value(BlockWeights.abstract(kind, weight.get_value().shape))
            kept += 1
    return kept
