"""Teacher-forced logits and hidden states of a whole sequence, for research and tests: the model without the engine.

Runs in prefill blocks over a cache of its own, compiled for each length bucket on first use.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxinfer import compat
from jaxinfer.engine.media import place_media
from jaxinfer.engine.modules import FlatModule
from jaxinfer.engine.request import token_ids as read_ids
from jaxinfer.errors import RequestError
from jaxinfer.kv.cache import CacheSpec, StepBatch
from jaxinfer.media.item import MediaItem
from jaxinfer.models.base import DecoderModel
from jaxinfer.models.vision.tower import VisionTower
from jaxinfer.parallel.collectives import gather_over
from jaxinfer.parallel.mesh import partition
from jaxinfer.parallel.programs import EVERYWHERE, jit_on, put
from jaxinfer.values import as_integer, shown
from jaxinfer.weights.load import Params

_LENGTH_STEP = 128  # lengths are padded to a multiple of this many tokens


class TeacherForcing:
    """Computes what a model predicts at every position of given tokens."""

    def __init__(
        self,
        model: DecoderModel,
        params: Params,
        cache_spec: CacheSpec,
        max_len: int,
        *,
        tower: VisionTower | None = None,
        mesh: Mesh | None = None,
    ):
        """
        Args:
          params: of the model, then of its tower.
          mesh: where the parameters are; None: one device.
        """
        flat = FlatModule(model, mesh)
        flat_tower = None if tower is None else FlatModule(tower, mesh)
        self._tower, self._tower_params = tower, params[len(flat.specs) :]
        self._image_token: int | None = model.config.image_token_id
        self._dtype = model.compute_dtype
        self._params = params[: len(flat.specs)]
        self._spec = cache_spec
        self._max_len = max_len
        self._num_layers: int = model.config.num_layers
        self._vocab_size: int = model.config.vocab_size
        self._groups = len(model.page_groups)
        cache_parts = (partition(model.cache_axes, "KV cache"),) * cache_spec.arrays
        # What lies with other processes cannot be read.
        whole = mesh is not None and compat.spans_processes(mesh)
        logits_part = EVERYWHERE if whole else partition((None, "vocab"), "logits")

        @functools.cache
        def program(layers: tuple[int, ...], want_logits: bool):
            def run(params, tokens, cache, batch: StepBatch, media):
                module = flat.merge(params)
                record: dict[int, Any] = dict.fromkeys(layers)
                hidden, cache = module(tokens, batch, cache, media=media, record=record)
                logits = module.output_head.logits(hidden) if want_logits else None
                if logits is not None and whole:
                    logits = gather_over("vocab", logits).swapaxes(1, 2).reshape(*logits.shape[:1], -1)
                # The written cache is returned so that donating the empty one is of use.
                return logits, tuple(record[i].astype(jnp.float32) for i in layers), cache

            in_specs = (flat.parts, EVERYWHERE, cache_parts, EVERYWHERE, EVERYWHERE)
            return jit_on(mesh, run, in_specs, (logits_part, EVERYWHERE, cache_parts), donate=(2,))

        @functools.cache
        def tower_program(size: int):
            assert flat_tower is not None
            run = functools.partial(_rows, flat_tower)
            return jit_on(mesh, run, (flat_tower.parts, EVERYWHERE), EVERYWHERE)

        def empty_cache(num_pages: int):
            place = None if mesh is None else tuple(NamedSharding(mesh, part) for part in cache_parts)
            return jax.jit(lambda: cache_spec.init(num_pages), out_shardings=place)()

        self._program, self._tower_program, self._empty_cache = program, tower_program, empty_cache
        self._everywhere = None if mesh is None else NamedSharding(mesh, EVERYWHERE)

    def logits(self, token_ids: Sequence[int] | np.ndarray, media: Sequence[MediaItem] = ()) -> np.ndarray:
        """Next-token logits of every position, float32 [T, V].

        media: images, in the order of their placeholders among the tokens.
        Raises RequestError for token ids that are none of the model's, for none or too many of them, and for
        images that do not fit their placeholders.
        """
        ids = self.checked(token_ids)
        logits, _, _ = self._call(ids, (), want_logits=True, media=media)
        assert logits is not None
        return np.asarray(logits)[: len(ids)]

    def hidden_states(
        self, token_ids: Sequence[int] | np.ndarray, layers: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """Hidden states, float32 [T, D], by layer: 0 the embeddings, i the output of layer i, the last one normalised.

        Negative numbers count from the end, as in Hugging Face's `hidden_states`. Raises RequestError as `logits`
        does, and for a layer that the model does not have.
        """
        asked = self.checked_layers(layers)
        ids = self.checked(token_ids)
        count = self._num_layers + 1
        _, states, _ = self._call(ids, tuple(layer % count for layer in asked), want_logits=False)
        return {layer: np.asarray(s)[: len(ids)] for layer, s in zip(asked, states, strict=True)}

    def checked_layers(self, layers: Sequence[int]) -> list[int]:
        """The layers as integers. RequestError for one that the model does not have."""
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            raise RequestError(f"layers must be a list of layer numbers, got {shown(layers)}", param="layers")
        count = self._num_layers + 1
        asked: list[int] = []
        for layer in layers:
            number = as_integer(layer)
            if number is None or not -count <= number < count:
                raise RequestError(
                    f"layer {shown(layer)} does not exist: this model has 0 to {count - 1}", param="layers"
                )
            asked.append(number)
        return asked

    def checked(self, token_ids: Sequence[int] | np.ndarray) -> list[int]:
        """The ids as integers. RequestError for ids that are none of the model's, and for none or too many of them."""
        ids = read_ids(token_ids, "token_ids")
        if not 0 < len(ids) <= self._max_len:
            raise RequestError(f"{len(ids)} tokens do not fit: 1 to {self._max_len} do", param="token_ids")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            bad = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise RequestError(
                f"token id {bad} is outside the vocabulary of {self._vocab_size}", param="token_ids"
            )
        return ids

    def _encode(self, ids: list[int], media: Sequence[MediaItem]) -> tuple[list[int], jax.Array | None]:
        """The ids with placeholders replaced by the rows that stand for them, and those rows."""
        if self._tower is None or self._image_token is None:
            if media:
                raise RequestError("this model takes no images", param="pixel_values")
            return ids, None
        if not media:
            return ids, None
        try:
            placed = place_media(ids, self._image_token, media)
        except ValueError as e:
            raise RequestError(str(e), param="pixel_values") from None
        rows = [
            self._tower_program(batch.size)(self._tower_params, batch.arrays)[: batch.num_rows]
            for item in media
            for batch in self._tower.batches(item.pixel_values, item.grid_thw)
        ]
        ids = list(ids)
        for row, position in enumerate(placed.positions):
            ids[position] = self._vocab_size + row
        return ids, jnp.concatenate(rows).astype(self._dtype)

    def _call(
        self, ids: list[int], layers: tuple[int, ...], *, want_logits: bool, media: Sequence[MediaItem] = ()
    ):
        ids, rows = self._encode(ids, media)
        length = len(ids)
        # One block holds the whole sequence; its pages are 1, 2, 3, ... of a cache made for this call.
        page = self._spec.page_size
        block = -(-length // _LENGTH_STEP) * _LENGTH_STEP
        block = -(-block // page) * page
        pages = block // page
        batch = StepBatch(
            positions=jnp.arange(block, dtype=jnp.int32),
            tables=jnp.tile(jnp.arange(1, pages + 1, dtype=jnp.int32), (self._groups, 1, 1)),
            kv_lens=jnp.array([length], jnp.int32),
            num_decode=0,
            block=block,
        )
        tokens = np.zeros(block, np.int32)
        tokens[:length] = ids
        run = self._program(layers, want_logits)
        return run(self._params, tokens, self._empty_cache(pages + 1), put(batch, self._everywhere), rows)


def _rows(tower: FlatModule, params: tuple, arrays: Any) -> jax.Array:
    return tower.merge(params).rows(arrays)
