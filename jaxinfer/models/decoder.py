"""The frame that all decoder-only families share: embedding, layers over the paged cache, final norm, head."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxinfer.config.model import ModelConfig
from jaxinfer.errors import ConfigError
from jaxinfer.kv.cache import StepBatch
from jaxinfer.kv.pages import LayerPlace, PageGroup, place_layers
from jaxinfer.models.base import Cache, CacheLayout, DecoderModel, Pages
from jaxinfer.models.layers.linear import Embedding
from jaxinfer.models.layers.norm import RMSNorm
from jaxinfer.models.layers.rope import RopeTables, inverse_frequencies, rope_tables
from jaxinfer.models.params import Axis
from jaxinfer.parallel.collectives import parts
from jaxinfer.parallel.stages import Stage


@dataclass(frozen=True, slots=True)
class Step:
    """What the layers of a step have in common.

    Attributes:
      ropes: cos and sin of the tokens' phases: "global", and "local" where sliding layers turn at another speed.
    """

    batch: StepBatch
    ropes: dict[str, RopeTables]


class Decoder(DecoderModel):
    """A family gives `make_layer`; the rest follows from its config.

    Args:
      dtype: of the weights.
      compute_dtype: of the hidden states between products; None: as the weights.
      max_len: longest context that will be asked for, tokens; "dynamic" RoPE stretches its base for it.
      stage: of a pipeline; the module then has that stage's parameters alone. None: all of them.
    """

    NORM_OFFSET: ClassVar[float] = 0.0  # RMSNorm multiplies by offset + weight

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        compute_dtype: DTypeLike | None = None,
        max_len: int | None = None,
        stage: Stage | None = None,
    ):
        c = config
        self.config = c
        self.stage = stage = Stage(0, (0, c.num_layers)) if stage is None else stage
        self.compute_dtype = dtype if compute_dtype is None else compute_dtype
        self.max_len = max_len
        self.parts = parts("heads")
        check_heads(c, self.parts)
        looks = [look_of(c, i) for i in range(c.num_layers)]
        self.groups, places = place_layers(looks, stage.bounds)
        self.places = tuple(places[i] for i in stage.layers)
        name, cap = f"{c.tensor_prefix}model", c.final_softcap
        shape = (c.vocab_size, c.hidden_size)
        tied = c.tie_word_embeddings
        self.embed = (
            Embedding(f"{name}.embed_tokens", *shape, dtype=dtype, softcap=cap)
            if stage.is_first or (tied and stage.is_last)
            else None
        )
        self.layers = nnx.List(
            [self.make_layer(f"{name}.layers.{i}", i, places[i], dtype) for i in stage.layers]
        )
        self.norm = (
            RMSNorm(f"{name}.norm", c.hidden_size, eps=c.rms_norm_eps, dtype=dtype, offset=self.NORM_OFFSET)
            if stage.is_last
            else None
        )
        self.head = (
            Embedding(f"{c.tensor_prefix}lm_head", *shape, dtype=dtype, softcap=cap)
            if stage.is_last and not tied
            else None
        )

    @abstractmethod
    def make_layer(self, name: str, index: int, place: LayerPlace, dtype: DTypeLike) -> nnx.Module:
        """Layer `index`, whose tensors' names start with `name`: (x [T, D], step, pages) -> (x, pages)."""

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        return self.groups

    @property
    def cache_layout(self) -> CacheLayout:
        c, arrays = self.config, 1 + max(place.array for place in self.places)
        if c.mla is not None:
            return CacheLayout(arrays, planes=1, kv_heads=1, head_dim=c.mla.latent_dim)
        heads = max(c.num_kv_heads, self.parts)  # devices that share a key head each keep a copy
        return CacheLayout(arrays, planes=2, kv_heads=heads, head_dim=c.head_dim)

    def cache_axes(self, lanes: int = 1) -> tuple[Axis, ...]:
        # A latent belongs to all heads.
        return (None,) * 5 if self.config.mla is not None and lanes == 1 else super().cache_axes(lanes)

    @property
    def output_head(self) -> Embedding | None:
        return (self.head or self.embed) if self.stage.is_last else None

    def __call__(
        self,
        inputs: Int[Array, " T"] | Float[Array, "T D"],
        batch: StepBatch,
        cache: Cache,
        *,
        media: Float[Array, "M D"] | None = None,
        record: dict[int, Any] | None = None,
    ) -> tuple[Float[Array, "T D"], Cache]:
        record = {} if record is None else record
        step = Step(batch, self._ropes(batch.positions))
        x = self._embed(inputs, media) if self.stage.is_first else inputs
        pages: list[Pages] = list(cache)
        for i, layer, place in zip(self.stage.layers, self.layers, self.places, strict=True):
            if i in record:
                record[i] = x
            x, pages[place.array] = layer(x, step, pages[place.array])
        if self.norm is not None:
            x = self.norm(x)
        end = self.stage.layers.stop
        if self.stage.is_last and end in record:
            record[end] = x
        return x, tuple(pages)

    def _embed(self, tokens: Int[Array, " T"], media: Float[Array, "M D"] | None) -> Float[Array, "T D"]:
        assert self.embed is not None
        x = self.embed(tokens).astype(self.compute_dtype)
        if self.config.embed_scale != 1.0:
            # The factor is rounded as the weights are, as these models were trained.
            stored = self.embed.weight.get_value().dtype
            x = x * jnp.asarray(self.config.embed_scale, stored).astype(x.dtype)
        if media is None:
            return x
        vocab = self.config.vocab_size
        rows = media.at[jnp.maximum(tokens - vocab, 0)].get(mode="clip").astype(x.dtype)
        return jnp.where((tokens >= vocab)[:, None], rows, x)

    def _ropes(self, positions: Int[Array, " T"]) -> dict[str, RopeTables]:
        c = self.config
        width = c.head_dim if c.mla is None else c.mla.rope_dim
        kinds = {"global": c.rope} | ({} if c.local_rope is None else {"local": c.local_rope})
        return {
            kind: rope_tables(positions, *inverse_frequencies(rope, width, max_len=self.max_len))
            for kind, rope in kinds.items()
        }


class PreNormLayer(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): the layer of most families."""

    def __init__(
        self, name: str, config: ModelConfig, attention: Any, feed_forward: Any, *, dtype: DTypeLike
    ):
        width, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(f"{name}.input_layernorm", width, eps=eps, dtype=dtype)
        self.attention = attention
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps=eps, dtype=dtype)
        self.mlp = feed_forward

    def __call__(self, x: Float[Array, "T D"], step: Step, pages: Pages) -> tuple[Float[Array, "T D"], Pages]:
        mixed, pages = self.attention(self.attention_norm(x), step, pages)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), pages


def check_heads(config: ModelConfig, devices: int) -> None:
    """ConfigError unless heads divide among devices, or devices among key heads."""
    if config.num_heads % devices:
        raise ConfigError(f"tp={devices} does not divide {config.num_heads} attention heads")
    keys = config.num_kv_heads
    if keys % devices and devices % keys:
        raise ConfigError(f"tp={devices} and {keys} key heads: neither divides the other")


def look_of(config: ModelConfig, layer: int) -> PageGroup:
    """How far back a layer's queries see."""
    look = config.looks[layer] if config.looks else "full"
    span = {"full": 0, "sliding": config.sliding_window, "chunked": config.attention_chunk}[look]
    assert span is not None  # ModelConfig has checked it
    return PageGroup(look, span)
