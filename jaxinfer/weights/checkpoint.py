"""What every kind of checkpoint offers: a Hugging Face style config, tensors by their Hugging Face names, and a tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.text.tokenizer import Tokenizer
from pallas_kernels.linear import BlockKind, BlockWeights


class Checkpoint(ABC):
    """An opened checkpoint. Tensors are read on demand, one at a time; nothing is kept after `read` returns.

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

    @abstractmethod
    def names(self) -> Set[str]:
        """Names of all tensors, as a Hugging Face checkpoint spells them."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor without reading it."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The tensor, in its stored dtype (dequantised to float32 where that has no numpy counterpart).

        Raises CheckpointError naming the file and the tensor when it cannot be read.
        """

    def block_kind(self, name: str) -> BlockKind | None:
        """The kind of blocks of codes that a tensor is stored in, where BlockWeights can hold them as they are; else None."""
        return None

    def read_blocks(self, name: str) -> BlockWeights:
        """A tensor of some `block_kind` in its blocks, as NumPy arrays. Raises CheckpointError as `read` does."""
        raise NotImplementedError(f"{self.path} stores {name!r} as plain numbers")

    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that came with the weights, or None: such a model takes and gives token ids alone."""
