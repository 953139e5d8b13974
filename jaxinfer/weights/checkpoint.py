"""What every kind of checkpoint offers: a Hugging Face style config, tensors by their Hugging Face names, and a tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.config.model import ModelConfig
from jaxinfer.models.params import ParamSpec
from jaxinfer.models.registry import family_for
from jaxinfer.text.tokenizer import Tokenizer
from pallas_kernels.linear import BlockKind, BlockWeights

Task = Callable[[], None]
Params = tuple[jax.Array | BlockWeights, ...]
ShardingOf = Callable[[ParamSpec], jax.sharding.Sharding]


class Checkpoint(ABC):
    """An opened checkpoint. Tensors are read on demand, by any thread; nothing is kept after that.

    Attributes:
      path: the file or directory it was opened from.
      config: as in config.json, whatever the format on disk.
      generation_config: default sampling settings and end-of-sequence ids; empty when there are none.
      stored_dtype: dtype to serve in when the user names none ("float32", "bfloat16", …).
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    stored_dtype: str

    def model_config(self) -> ModelConfig:
        """What `config` says of the model. Raises CheckpointError and ConfigError for what is not supported."""
        return family_for(self.config).config_from_hf(self.config)

    @abstractmethod
    def names(self) -> Set[str]:
        """Names of all tensors, as a Hugging Face checkpoint spells them."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor without reading it."""

    def dtype(self, name: str) -> np.dtype:
        """The dtype `read` gives a tensor in, without reading it."""
        return np.dtype(np.float32)

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The tensor, in its stored dtype (dequantised to float32 where that has no numpy counterpart).

        Raises CheckpointError naming the file and the tensor when it cannot be read.
        """

    def fill(self, name: str, out: np.ndarray, start: int = 0) -> list[Task]:
        """Work for any threads that writes as many rows of a tensor as `out` has, from `start` on, cast to its dtype.

        `out` may be strided; rows are along axis 0.
        """

        def whole() -> None:
            out[...] = self.read(name)[start : start + len(out)]

        return [whole]

    def block_kind(self, name: str) -> BlockKind | None:
        """The kind of blocks of codes that a tensor is stored in, where BlockWeights can hold them as they are; else None."""
        return None

    def read_blocks(self, name: str) -> BlockWeights:
        """A tensor of some `block_kind` in its blocks, as NumPy arrays. Raises CheckpointError as `read` does."""
        raise NotImplementedError(f"{self.path} stores {name!r} as plain numbers")

    def fill_blocks(self, name: str, out: BlockWeights, start: int = 0) -> list[Task]:
        """`fill` for a tensor of some `block_kind`, into NumPy arrays."""

        def whole() -> None:
            for part, values in zip(out, self.read_blocks(name), strict=True):
                part[...] = values[start : start + len(part)]

        return [whole]

    def restore(self, specs: Sequence[ParamSpec], sharding_of: ShardingOf | None) -> Params | None:
        """The parameters on their devices, each of which gets its own slices, where the checkpoint holds them as they are;
        else None. `sharding_of` as in `load_params`."""
        return None

    def save_companions(self, folder: Path) -> None:
        """Writes to `folder` what came with the weights, but for the config: the tokenizer's files."""
        return None

    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that came with the weights, or None: such a model takes and gives token ids alone."""
