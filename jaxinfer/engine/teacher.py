"""Teacher-forced logits and hidden states of a whole sequence, for research and tests: the model without the engine.

Runs in prefill blocks over a cache of its own, compiled for each length bucket on first use.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence, Set
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxinfer import compat
from jaxinfer.engine.media import place_media
from jaxinfer.engine.modules import FlatModule
from jaxinfer.engine.request import token_ids as read_ids
from jaxinfer.engine.stages import ModelStage
from jaxinfer.errors import RequestError
from jaxinfer.kv.cache import StepBatch
from jaxinfer.media.item import MediaItem
from jaxinfer.models.vision.tower import VisionTower
from jaxinfer.parallel.collectives import gather_over
from jaxinfer.parallel.links import Link
from jaxinfer.parallel.mesh import partition
from jaxinfer.parallel.programs import EVERYWHERE, jit_on, put
from jaxinfer.values import as_integer, shown
from jaxinfer.weights.load import Params

_LENGTH_STEP = 128  # lengths are padded to a multiple of this many tokens


class TeacherForcing:
    """Computes what a model predicts at every position of given tokens."""

    def __init__(
        self,
        stages: Sequence[ModelStage],
        params: Sequence[Params],
        max_len: int,
        tower: VisionTower | None = None,
        tower_params: Params = (),
    ):
        """
        Args:
          params: of each stage.
        """
        model, mesh = stages[0].model, stages[0].mesh
        self._stages = [_Stage(stage, own) for stage, own in zip(stages, params, strict=True)]
        meshes = [stage.mesh for stage in stages]
        self._links = [Link(a, b) for a, b in pairwise(meshes) if a is not None and b is not None]
        flat_tower = None if tower is None else FlatModule(tower, mesh)
        self._tower, self._tower_params = tower, tower_params
        self._image_token: int | None = model.config.image_token_id
        self._dtype = model.compute_dtype
        self._page_size = stages[0].cache.page_size
        self._max_len = max_len
        self._num_layers: int = model.config.num_layers
        self._vocab_size: int = model.config.vocab_size
        self._groups = len(model.page_groups)

        @functools.cache
        def tower_program(size: int):
            assert flat_tower is not None
            run = functools.partial(_rows, flat_tower)
            return jit_on(mesh, run, (flat_tower.parts, EVERYWHERE), EVERYWHERE)

        self._tower_program = tower_program

    def logits(self, token_ids: Sequence[int] | np.ndarray, media: Sequence[MediaItem] = ()) -> np.ndarray:
        """Next-token logits of every position, float32 [T, V].

        media: images, in the order of their placeholders among the tokens.
        Raises RequestError for token ids that are none of the model's, for none or too many of them, and for
        images that do not fit their placeholders.
        """
        ids = self.checked(token_ids)
        logits, _ = self._call(ids, set(), want_logits=True, media=media)
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
        _, states = self._call(ids, {layer % count for layer in asked}, want_logits=False)
        return {layer: np.asarray(states[layer % count])[: len(ids)] for layer in asked}

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
        self, ids: list[int], layers: Set[int], *, want_logits: bool, media: Sequence[MediaItem] = ()
    ) -> tuple[jax.Array | None, dict[int, jax.Array]]:
        """Logits, and hidden states by layer."""
        ids, rows = self._encode(ids, media)
        length = len(ids)
        # One block holds the whole sequence; its pages are 1, 2, 3, ... of a cache made for this call.
        page = self._page_size
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
        first, *later = self._stages
        logits, states, hidden = first(tokens, pages + 1, batch, rows, layers, want_logits)
        for link, stage in zip(self._links, later, strict=True):
            assert hidden is not None
            logits, more, hidden = stage(link.send(hidden), pages + 1, batch, None, layers, want_logits)
            states |= more
        return logits, states


class _Stage:
    """One stage's part of it. Compiled for each length on first use."""

    def __init__(self, stage: ModelStage, params: Params):
        model, mesh, spec = stage.model, stage.mesh, stage.cache
        flat = FlatModule(model, mesh)
        self._params, self._stage = params, model.stage
        cache_parts = (partition(model.cache_axes(), "KV cache"),) * spec.arrays
        # What lies with other processes cannot be read.
        whole = mesh is not None and compat.spans_processes(mesh)
        logits_part = EVERYWHERE if whole else partition((None, "vocab"), "logits")

        @functools.cache
        def program(layers: tuple[int, ...], want_logits: bool):
            def run(params, entering, cache, batch: StepBatch, media):
                module = flat.merge(params)
                record: dict[int, Any] = dict.fromkeys(layers)
                hidden, cache = module(entering, batch, cache, media=media, record=record)
                head = module.output_head if want_logits else None
                logits = None if head is None else head.logits(hidden)
                if logits is not None and whole:
                    logits = gather_over("vocab", logits).swapaxes(1, 2).reshape(*logits.shape[:1], -1)
                states = tuple(record[i].astype(jnp.float32) for i in layers)
                # The written cache is returned so that donating the empty one is of use.
                return logits, states, None if model.stage.is_last else hidden, cache

            in_specs = (flat.parts, EVERYWHERE, cache_parts, EVERYWHERE, EVERYWHERE)
            out_specs = (logits_part, EVERYWHERE, EVERYWHERE, cache_parts)
            return jit_on(mesh, run, in_specs, out_specs, donate=(2,))

        def empty_cache(num_pages: int):
            place = None if mesh is None else tuple(NamedSharding(mesh, part) for part in cache_parts)
            return jax.jit(lambda: spec.init(num_pages), out_shardings=place)()

        self._program, self._empty_cache = program, empty_cache
        self._everywhere = None if mesh is None else NamedSharding(mesh, EVERYWHERE)

    def __call__(
        self,
        entering: np.ndarray | jax.Array,
        num_pages: int,
        batch: StepBatch,
        media: jax.Array | None,
        layers: Set[int],
        want_logits: bool,
    ) -> tuple[jax.Array | None, dict[int, jax.Array], jax.Array | None]:
        """Logits and hidden states, where this stage makes them, and what the next one gets."""
        own = tuple(
            sorted(
                i
                for i in layers
                if i in self._stage.layers or (self._stage.is_last and i == self._stage.layers.stop)
            )
        )
        run = self._program(own, want_logits)
        logits, states, hidden, _ = run(
            self._params, entering, self._empty_cache(num_pages), put(batch, self._everywhere), media
        )
        return logits, dict(zip(own, states, strict=True)), hidden


def _rows(tower: FlatModule, params: tuple, arrays: Any) -> jax.Array:
    return tower.merge(params).rows(arrays)
