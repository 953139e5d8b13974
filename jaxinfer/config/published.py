"""Configurations of published models, kept in configs/models, and how large those models are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jaxinfer.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVSize:
    """What the layers that look back equally far keep of one token.

    Attributes:
      look, span: as in jaxinfer.kv.pages.PageGroup; with a span, a token's bytes are given back when all queries are past it.
      bytes_per_token: of all these layers together, in bfloat16.
    """

    look: Literal["full", "sliding", "chunked"]
    span: int
    layers: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a model is. Counts are of elements.

    Attributes:
      parameters: of the language model, without layers that predict further tokens (DeepSeek-V3's files have one).
      active: those that one token uses: all but the experts it does not go to. The embedding and the head count in full.
      vision: of the tower and its projector.
      stored_bytes: of all of them as the checkpoint stores them, scales of quantised ones included.
      kv: by how far layers look back.
    """

    parameters: int
    active: int
    vision: int
    stored_bytes: int
    kv: tuple[KVSize, ...]

    def bytes_in(self, dtype: Literal["float32", "bfloat16"]) -> int:
        """Of all parameters, vision too, when every one of them is of this dtype."""
        return (self.parameters + self.vision) * _BYTES[dtype]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Sizes:
        return cls(**{**values, "kv": tuple(KVSize(**kv) for kv in values["kv"])})


def folder() -> Path:
    """Where the configurations are: in an installed package inside of it, in a checkout beside it."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


@cache
def published() -> tuple[str, ...]:
    """Names of the published models, in order."""
    return tuple(sorted(file.stem for file in (folder() / "models").glob("*.json")))


def published_config(name: str) -> dict[str, Any]:
    """The config.json of a published model. Raises ConfigError for a name that is none."""
    if name not in published():
        raise ConfigError(
            f"no published configuration is called {name!r}; there are: {', '.join(published())}"
        )
    return json.loads((folder() / "models" / f"{name}.json").read_text())


def published_sizes() -> dict[str, Sizes]:
    """Sizes of the published models by name, as scripts/model_sizes.py has written them: computing them imports JAX."""
    written = json.loads((folder() / "sizes.json").read_text())
    return {name: Sizes.from_json(values) for name, values in written.items()}
