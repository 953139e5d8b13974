"""What the engine asks of every model family."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxinfer.config.model import ModelConfig
from jaxinfer.kv.cache import StepBatch
from jaxinfer.kv.pages import PageGroup
from jaxinfer.models.layers.linear import Embedding
from jaxinfer.models.params import Axis
from jaxinfer.parallel.stages import Stage

Pages = Float[Array, "planes KV P page hd"]
Cache = tuple[Pages, ...]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What one token takes in the cache: `arrays` of [planes, kv_heads, head_dim] values for each page group."""

    arrays: int
    planes: int
    kv_heads: int
    head_dim: int


class DecoderModel(nnx.Module):
    """A decoder-only transformer over a paged KV cache, or one pipeline stage of it.

    Constructing one declares its parameters and allocates nothing: see jaxinfer.models.params.
    """

    config: ModelConfig
    compute_dtype: DTypeLike  # of hidden states
    stage: Stage  # the part of the model that this module is

    @property
    @abstractmethod
    def page_groups(self) -> tuple[PageGroup, ...]:
        """How far back the layers of each group look. The groups share the cache's arrays."""

    def cache_axes(self, lanes: int = 1) -> tuple[Axis, ...]:
        """Logical axes of the cache's arrays [planes, KV, P, page, hd]: which of them devices may split.

        lanes: as in StepBatch.
        """
        return (None, "heads", None, None, None) if lanes == 1 else (None, None, "lanes", None, None)

    @property
    @abstractmethod
    def cache_layout(self) -> CacheLayout:
        """The values that one token adds to this stage's cache."""

    @property
    def unused_tensors(self) -> re.Pattern[str] | None:
        """Names (from their start) of tensors that checkpoints of this family hold and the model has no use for."""
        return None

    @property
    @abstractmethod
    def output_head(self) -> Embedding | None:
        """The module whose `logits` turns final hidden states into next-token logits; None: a later stage has it."""

    @abstractmethod
    def __call__(
        self,
        inputs: Int[Array, " T"] | Float[Array, "T D"],
        batch: StepBatch,
        cache: Cache,
        *,
        media: Float[Array, "M D"] | None = None,
        record: dict[int, Any] | None = None,
    ) -> tuple[Float[Array, "T D"], Cache]:
        """Final hidden states of a step's tokens, normalised, and the cache with their keys and values written.

        inputs: token ids; for stages after the first what the stage before has returned, as this one does for the next.
        media: embeddings of images; a token of vocab_size + i stands for row i.
        record: its keys name hidden states to keep, as Hugging Face counts them: 0 the embeddings, i the output of
          layer i, the last one normalised. The values of those that this stage makes are set, each [T, D].
        """
