"""The engine's compiled programs. Everything is compiled ahead, for the shapes of a bucket table; later calls only look up.

A step is two programs. `forward` runs the model over the step's tokens and writes their KV in place; `sample` turns
the hidden states of the rows that need a token into tokens. Their shape tables add up instead of multiplying, and a
prefill chunk that does not reach the end of its prompt needs no second program. `score` is for prompt log-probabilities.

The host gives each program one int32 array (`ForwardLayout`; for `sample`, a row of integers and of floats' bits for each
token): every further argument costs time in each step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from jaxinfer.engine.buckets import Bucket, BucketTable
from jaxinfer.engine.executables import ExecutableStore, class_digest, environment_parts
from jaxinfer.engine.head_programs import HeadPrograms
from jaxinfer.engine.layout import ForwardLayout
from jaxinfer.engine.modules import FlatModule
from jaxinfer.kv.cache import CacheSpec, StepBatch
from jaxinfer.models.base import DecoderModel
from jaxinfer.models.vision.tower import VisionTower
from jaxinfer.parallel.mesh import partition
from jaxinfer.parallel.programs import EVERYWHERE

Cache = tuple[jax.Array, ...]


class StepPrograms(HeadPrograms):
    """Compiled programs of one pipeline stage of a model, or of all of it: `forward`, on the first `encode`, on the last `sample` and `score`.

    Attributes:
      stage: which one.
      tower: the model's vision tower, if it has one and this is the first stage.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache_spec: CacheSpec,
        buckets: BucketTable,
        *,
        num_pages: int,
        num_slots: int,
        table_width: int,
        tower: VisionTower | None = None,
        media_rows: int = 0,
        mesh: Mesh | None = None,
        keep: bool = False,
    ):
        """
        Args:
          num_pages: of each lane of `buckets`.
          num_slots: rows of per-sequence state, one more than the sequences of a step; the last belongs to padding.
          tower: makes embeddings of images.
          media_rows: size of the buffer of image embeddings, of models with a vision tower.
          mesh: what the programs run on; None: one device.
          keep: programs are read from the user cache where they are there, and written to it where they are not.
        """
        self._model = model
        self.stage = model.stage
        self._flat = FlatModule(model, mesh)
        self._spec = cache_spec
        self._buckets = buckets
        self._num_pages = num_pages * buckets.lanes
        self._table_width = table_width
        self.tower, self._media_rows = tower, 0 if tower is None else media_rows
        self._flat_tower = None if tower is None else FlatModule(tower, mesh)
        self._cache_parts = (partition(model.cache_axes(buckets.lanes), "KV cache"),) * cache_spec.arrays
        store = None
        if keep:
            # What the programs depend on beside the environment; their own shapes are in their names.
            parts = {
                "model": repr((type(model).__qualname__, model.config, self._flat, model.compute_dtype)),
                "family": class_digest(type(model)),
                "cache": repr((cache_spec, num_pages, buckets.lanes, model.page_groups)),
                "rows": repr((num_slots, table_width, self._media_rows)),
                "tower": repr(self._flat_tower),
                "mesh": repr(mesh and dict(mesh.shape)),
                "stage": repr(model.stage),
            }
            devices = None if mesh is None else mesh.devices.reshape(-1).tolist()
            store = ExecutableStore({**environment_parts(), **parts}, devices=devices)
        super().__init__(model, num_slots, mesh, store)
        head_sources = [spec.sources for spec in self._head.specs] if self._head else []
        self._head_index = [i for i, spec in enumerate(self._flat.specs) if spec.sources in head_sources]

    def layout(self, bucket: Bucket) -> ForwardLayout:
        return ForwardLayout(bucket, len(self._model.page_groups), self._table_width)

    @property
    def num_params(self) -> int:
        """Of the model itself; those of its vision tower follow."""
        return len(self._flat.specs)

    def head_params(self, params: tuple) -> tuple:
        """The part of the parameters that `sample` and `score` need."""
        return tuple(params[i] for i in self._head_index)

    def ask_for_all(self) -> None:
        buckets = self._buckets.all()
        for bucket in buckets:
            self.forward(bucket)
        if self.stage.is_last:
            for tokens in sorted({bucket.num_tokens for bucket in buckets if bucket.blocks}):
                self.score(tokens)
            for count in sorted({bucket.samples for bucket in buckets}):
                for full in (False, True):
                    self.sample(count, full)
            self.set_counts()
            self.set_bias()
        self.new_cache()
        for size in self.tower.sizes if self.tower else ():
            self.encode(size)

    def forward(self, bucket: Bucket):
        """(params, cache, last_tokens [slots], ints [layout.size], media [M, D] | None) ->
        (hidden [T, D], its sampled rows [S, D], cache). The cache is donated.

        A stage after the first takes the hidden states of the one before in place of last_tokens; one before the last returns
        None for the sampled rows.
        """
        return self._get(("forward", bucket), lambda: self._lower_forward(bucket))

    def encode(self, size: int):
        """(tower params, media [M, D], arrays, rows [R]) -> media with an image's embeddings written there; it is donated.

        arrays, R: of the tower's program of this size; rows at or past M are dropped.
        """
        return self._get(("encode", size), lambda: self._lower_encode(size))

    def _lower_forward(self, bucket: Bucket):
        layout, stage = self.layout(bucket), self.stage
        entering = (
            jax.ShapeDtypeStruct((self._num_slots,), jnp.int32)
            if stage.is_first
            else jax.ShapeDtypeStruct((bucket.num_tokens, self.hidden_size), self.dtype)
        )

        def forward(
            params,
            cache: Cache,
            entering: Int[Array, " slots"] | Float[Array, "T D"],
            ints: Int[Array, " n"],
            media: Float[Array, "M D"] | None,
        ):
            model = self._flat.merge(params)
            tokens, positions, kv_lens, samples, tables = layout.views(ints)
            if stage.is_first:
                entering = jnp.where(tokens < 0, entering[-1 - tokens], tokens)
            batch = StepBatch(
                positions=positions,
                tables=tables,
                kv_lens=kv_lens,
                num_decode=bucket.decode,
                block=bucket.block,
                lanes=self._buckets.lanes,
            )
            hidden, cache = model(entering, batch, cache, media=media)
            return hidden, hidden[samples] if stage.is_last else None, cache

        return self._lower(
            forward,
            (self._flat.shapes, self._flat.parts),
            (self._spec.abstract(self._num_pages), self._cache_parts),
            (entering, EVERYWHERE),
            (jax.ShapeDtypeStruct((layout.size,), jnp.int32), EVERYWHERE),
            (self.media_shape(), EVERYWHERE),
            out_specs=(EVERYWHERE, EVERYWHERE, self._cache_parts),
            donate=(1,),
        )

    def _lower_encode(self, size: int):
        tower, flat = self.tower, self._flat_tower
        assert tower is not None
        assert flat is not None

        def run(params, media: Float[Array, "M D"], arrays: Any, index: Int[Array, " R"]):
            rows = flat.merge(params).rows(arrays)
            return media.at[index].set(rows.astype(media.dtype), mode="drop")

        return self._lower(
            run,
            (flat.shapes, flat.parts),
            (self.media_shape(), EVERYWHERE),
            (tower.shapes(size), EVERYWHERE),
            (jax.ShapeDtypeStruct((tower.num_rows(size),), jnp.int32), EVERYWHERE),
            out_specs=EVERYWHERE,
            donate=(1,),
        )

    def media_shape(self) -> jax.ShapeDtypeStruct | None:
        """Shape of the buffer that holds image embeddings until their prompts are computed."""
        if not self._media_rows:
            return None
        return jax.ShapeDtypeStruct((self._media_rows, self.hidden_size), self.dtype)

    def hidden_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of what `forward` returns, for every bucket."""
        counts = sorted({bucket.num_tokens for bucket in self._buckets.all()})
        return [jax.ShapeDtypeStruct((count, self.hidden_size), self.dtype) for count in counts]

    def new_cache(self):
        """() -> an empty cache."""
        where = None if self.mesh is None else NamedSharding(self.mesh, self._cache_parts[0])
        init = jax.jit(lambda: self._spec.init(self._num_pages), out_shardings=where)
        return self._get(("cache",), lambda: init.lower())
