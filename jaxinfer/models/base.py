"""What the engine asks of every model family."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxinfer.config.model import ModelConfig
from jaxinfer.kv.cache import StepBatch
from jaxinfer.kv.pages import PageGroup
from jaxinfer.models.layers.linear import Embedding

Pages = Float[Array, "2 KV P page hd"]
Cache = tuple[Pages, ...]


class DecoderModel(nnx.Module):
    """A decoder-only transformer over a paged KV cache.

    Constructing one declares its parameters and allocates nothing: see jaxinfer.models.params.
    """

    config: ModelConfig
    compute_dtype: DTypeLike  # of hidden states

    @property
    @abstractmethod
    def page_groups(self) -> tuple[PageGroup, ...]:
        """How far back the layers look. The layers divide evenly among the groups, which share the cache's arrays."""

    @property
    @abstractmethod
    def output_head(self) -> Embedding:
        """The module whose `logits` turns final hidden states into next-token logits."""

    @abstractmethod
    def __call__(
        self,
        tokens: Int[Array, " T"],
        batch: StepBatch,
        cache: Cache,
        *,
        record: dict[int, Any] | None = None,
    ) -> tuple[Float[Array, "T D"], Cache]:
        """Final hidden states of a step's tokens, normalised, and the cache with their keys and values written.

        record: its keys name hidden states to keep, as Hugging Face counts them: 0 the embeddings, i the output of
          layer i, the last one normalised. Their values are set, each [T, D].
        """
