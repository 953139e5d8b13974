"""A module as programs take it: its parameters in a flat tuple, each with its place on the mesh."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.params import param_specs
from jaxinfer.parallel.mesh import partition
from jaxinfer.parallel.programs import abstract_on


class FlatModule:
    """Splits a module of declared parameters, and puts it together again around values.

    Attributes:
      specs: of the parameters, in order.
      parts: how each is spread over a mesh (PartitionSpec).
      shapes: what a program is compiled for.
    """

    def __init__(self, module: nnx.Module, mesh: Mesh | None):
        self._graph, state = nnx.split(module)
        self._treedef = jax.tree.structure(state)
        self.specs = param_specs(module)
        self.parts = tuple(partition(spec.axes, spec.sources[0]) for spec in self.specs)
        self.shapes = abstract_on(mesh, tuple(spec.value for spec in self.specs), self.parts)

    def merge(self, params: tuple) -> Any:
        """The module with these parameters."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._treedef, jax.tree.leaves(params)))

    def __repr__(self) -> str:
        """Everything that a program made from it depends on, but for the code."""
        return repr((self._graph, self.shapes))
