"""The engine's compiled programs. Everything is compiled ahead, for the shapes of a bucket table; later calls only look up.

A step is two programs. `forward` runs the model over the step's tokens and writes their KV in place; `sample` turns
the hidden states of the rows that need a token into tokens. Their shape tables add up instead of multiplying, and a
prefill chunk that does not reach the end of its prompt needs no second program. `score` is for prompt log-probabilities.

The host gives each program one int32 array (`ForwardLayout`; for `sample`, a row of integers and of floats' bits for each
token): every further argument costs time in each step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxinfer import compat
from jaxinfer.engine.buckets import Bucket, BucketTable
from jaxinfer.engine.executables import ExecutableStore, class_digest, environment_parts
from jaxinfer.engine.layout import ROW_FLOATS, ROW_INTS, ForwardLayout
from jaxinfer.engine.modules import FlatModule
from jaxinfer.engine.sampling import Logprobs, RowParams, SamplerState, logprobs_of, sample
from jaxinfer.kv.cache import CacheSpec, StepBatch
from jaxinfer.models.base import DecoderModel
from jaxinfer.models.vision.tower import VisionTower
from jaxinfer.parallel.mesh import partition
from jaxinfer.parallel.programs import EVERYWHERE, abstract_on, jit_on, put

Cache = tuple[jax.Array, ...]

_SCORE_ROWS = 64  # prompt positions whose logits exist at once


class StepPrograms:
    """Compiled `forward`, `sample` and `score` programs of one model on one set of devices.

    Attributes:
      num_compiled: programs built so far; constant once `compile_all` has returned.
      tower: the model's vision tower, if it has one.
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
          num_slots: rows of per-sequence state, one more than the sequences of a step; the last belongs to padding.
          tower: makes embeddings of images.
          media_rows: size of the buffer of image embeddings, of models with a vision tower.
          mesh: what the programs run on; None: one device.
          keep: programs are read from the user cache where they are there, and written to it where they are not.
        """
        self._model = model
        self._mesh = mesh
        self._flat, self._head = FlatModule(model, mesh), FlatModule(model.output_head, mesh)
        head_sources = [spec.sources for spec in self._head.specs]
        self._head_index = [i for i, spec in enumerate(self._flat.specs) if spec.sources in head_sources]
        self._spec = cache_spec
        self._buckets = buckets
        self._num_pages, self._num_slots = num_pages, num_slots
        self._table_width = table_width
        self.tower, self._media_rows = tower, 0 if tower is None else media_rows
        self._flat_tower = None if tower is None else FlatModule(tower, mesh)
        self._compiled: dict[tuple, Any] = {}
        self._pool: ThreadPoolExecutor | None = None  # while everything is compiled
        self._compiling: dict[tuple, Future] = {}
        self.vocab_size: int = model.config.vocab_size
        self.hidden_size: int = model.config.hidden_size
        self._dtype = model.compute_dtype
        self._cache_parts = (partition(model.cache_axes, "KV cache"),) * cache_spec.arrays
        by_token = partition((None, "vocab"), "sampler state")
        self._state_parts = SamplerState._make([by_token, by_token, EVERYWHERE])
        devices = None if mesh is None else mesh.devices.reshape(-1).tolist()
        self._store = (
            ExecutableStore({**environment_parts(), **self._parts()}, devices=devices) if keep else None
        )

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def layout(self, bucket: Bucket) -> ForwardLayout:
        return ForwardLayout(bucket, len(self._model.page_groups), self._table_width)

    @property
    def num_params(self) -> int:
        """Of the model itself; those of its vision tower follow."""
        return len(self._flat.specs)

    def head_params(self, params: tuple) -> tuple:
        """The part of the parameters that `sample` and `score` need."""
        return tuple(params[i] for i in self._head_index)

    def compile_all(self) -> None:
        """Builds every program that serving can ask for."""
        # Lowering holds the GIL, compiling does not.
        with ThreadPoolExecutor(os.cpu_count()) as pool, self._fresh():
            self._pool = pool
            for bucket in self._buckets.all():
                self.forward(bucket)
                if bucket.blocks:
                    self.score(bucket.num_tokens)
            for count in self._buckets.row_sizes:
                for full in (False, True):
                    self.sample(count, full)
            self.set_counts()
            self.set_bias()
            self.new_cache()
            for size in self.tower.sizes if self.tower else ():
                self.encode(size)
            self._pool = None
            self._compiled |= {key: program.result() for key, program in self._compiling.items()}
            self._compiling.clear()
        if self._store:
            self._store.prune()

    def forward(self, bucket: Bucket):
        """(params, cache, last_tokens [slots], ints [layout.size], media [M, D] | None) ->
        (hidden [T, D], its sampled rows [S, D], cache). The cache is donated.
        """
        return self._get(("forward", bucket), lambda: self._lower_forward(bucket))

    def sample(self, count: int, full: bool):
        """(head params, hidden [S, D], last_tokens, rows [S, 11], want_logprobs, state | None) ->
        (tokens [S], last_tokens, Logprobs | None, state | None).

        full: penalties, biases and log-probabilities, which need the state. last_tokens and state are donated.
        """
        return self._get(("sample", count, full), lambda: self._lower_sample(count, full))

    def score(self, num_tokens: int):
        """(head params, hidden [T, D], targets [T]) -> Logprobs of each position's target."""
        return self._get(("score", num_tokens), lambda: self._lower_score(num_tokens))

    def encode(self, size: int):
        """(tower params, media [M, D], arrays, rows [R]) -> media with an image's embeddings written there; it is donated.

        arrays, R: of the tower's program of this size; rows at or past M are dropped.
        """
        return self._get(("encode", size), lambda: self._lower_encode(size))

    def _get(self, key: tuple, lower) -> Any:
        program = self._compiled.get(key)
        if program is None:
            name = "-".join(str(astuple(p) if isinstance(p, Bucket) else p) for p in key).replace(", ", "_")
            program = self._store.load(name) if self._store else None
            if program is None:
                lowered = lower()
                if self._pool is not None:
                    self._compiling[key] = self._pool.submit(self._compile, lowered, name)
                    return None
                with self._fresh():
                    program = self._compile(lowered, name)
            self._compiled[key] = program
        return program

    def _compile(self, lowered: Any, name: str) -> Any:
        program = lowered.compile()
        if self._store:
            self._store.save(name, program)
        return program

    def _fresh(self) -> contextlib.AbstractContextManager[None]:
        """Programs to be kept must not come from XLA's own cache."""
        return compat.without_compilation_cache() if self._store else contextlib.nullcontext()

    def _parts(self) -> dict[str, str]:
        """What the programs depend on beside the environment; their own shapes are in their names."""
        return {
            "model": repr((type(self._model).__qualname__, self._model.config, self._flat, self._dtype)),
            "family": class_digest(type(self._model)),
            "cache": repr((self._spec, self._num_pages, self._model.page_groups)),
            "rows": repr((self._num_slots, self._table_width, self._media_rows)),
            "tower": repr(self._flat_tower),
            "mesh": repr(self._mesh and dict(self._mesh.shape)),
        }

    def _lower_forward(self, bucket: Bucket):
        layout = self.layout(bucket)

        def forward(
            params,
            cache: Cache,
            last_tokens: Int[Array, " slots"],
            ints: Int[Array, " n"],
            media: Float[Array, "M D"] | None,
        ):
            model = self._flat.merge(params)
            tokens, positions, kv_lens, samples, tables = layout.views(ints)
            tokens = jnp.where(tokens < 0, last_tokens[-1 - tokens], tokens)
            batch = StepBatch(
                positions=positions,
                tables=tables,
                kv_lens=kv_lens,
                num_decode=bucket.decode,
                block=bucket.block,
            )
            hidden, cache = model(tokens, batch, cache, media=media)
            return hidden, hidden[samples], cache

        return self._lower(
            forward,
            (self._flat.shapes, self._flat.parts),
            (self._spec.abstract(self._num_pages), self._cache_parts),
            (jax.ShapeDtypeStruct((self._num_slots,), jnp.int32), EVERYWHERE),
            (jax.ShapeDtypeStruct((layout.size,), jnp.int32), EVERYWHERE),
            (self.media_shape(), EVERYWHERE),
            out_specs=(EVERYWHERE, EVERYWHERE, self._cache_parts),
            donate=(1,),
        )

    def _lower(
        self,
        function: Callable[..., Any],
        *args: tuple[Any, Any],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """Traces a program; args: shapes of each argument, and how it is spread over the mesh."""
        program = jit_on(self._mesh, function, tuple(spec for _, spec in args), out_specs, donate)
        return program.lower(*(abstract_on(self._mesh, s, spec) for s, spec in args))

    def _lower_sample(self, count: int, full: bool):
        def run(
            head_params,
            hidden: Float[Array, "S D"],
            last_tokens: Int[Array, " slots"],
            row_bits: Int[Array, "S 11"],
            want_logprobs: Bool[Array, ""],
            state: SamplerState | None,
        ):
            head = self._head.merge(head_params)
            ints, floats = row_bits[:, : len(ROW_INTS)], row_bits[:, len(ROW_INTS) :]
            floats = jax.lax.bitcast_convert_type(floats, jnp.float32)
            named = {name: ints[:, i] for i, name in enumerate(ROW_INTS)}
            named |= {name: floats[:, i] for i, name in enumerate(ROW_FLOATS)}
            seed = jnp.stack([named.pop("seed_low"), named.pop("seed_high")], axis=1)
            rows = RowParams(seed=seed, **named)
            logits = head.logits(hidden)
            tokens, state = sample(logits, rows, state)
            last_tokens = last_tokens.at[rows.slot].set(tokens)
            if not full:
                return tokens, last_tokens, None, state
            nothing = jax.tree.map(
                lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(logprobs_of, logits, tokens)
            )
            scores = jax.lax.cond(want_logprobs, logprobs_of, lambda *_: nothing, logits, tokens)
            return tokens, last_tokens, scores, state

        return self._lower(
            run,
            (self._head.shapes, self._head.parts),
            (jax.ShapeDtypeStruct((count, self.hidden_size), self._dtype), EVERYWHERE),
            (jax.ShapeDtypeStruct((self._num_slots,), jnp.int32), EVERYWHERE),
            (jax.ShapeDtypeStruct((count, len(ROW_INTS) + len(ROW_FLOATS)), jnp.int32), EVERYWHERE),
            (jax.ShapeDtypeStruct((), jnp.bool_), EVERYWHERE),
            (self._state(), self._state_parts) if full else (None, EVERYWHERE),
            out_specs=(EVERYWHERE, EVERYWHERE, EVERYWHERE, self._state_parts if full else EVERYWHERE),
            donate=(2, 5),
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
        return jax.ShapeDtypeStruct((self._media_rows, self.hidden_size), self._dtype)

    def fresh_state(self) -> SamplerState:
        """The per-slot state that a full sample needs: nothing counted, biased or forbidden. Made without a compile."""
        fills = SamplerState._make([0, 0, -1])
        return jax.tree.map(
            lambda s, fill: put(np.full(s.shape, fill, s.dtype), s.sharding),
            abstract_on(self._mesh, self._state(), self._state_parts),
            fills,
        )

    def put(self, value: np.ndarray | np.generic) -> jax.Array:
        """A host array on every device of the mesh."""
        return put(value, self.everywhere)

    @property
    def everywhere(self) -> NamedSharding | None:
        return None if self._mesh is None else NamedSharding(self._mesh, EVERYWHERE)

    def _state(self) -> SamplerState:
        by_token, words = (self._num_slots, self.vocab_size), (self._num_slots, -(-self.vocab_size // 32))
        shapes = [(by_token, jnp.int32), (by_token, jnp.float32), (words, jnp.int32)]
        return SamplerState._make(jax.ShapeDtypeStruct(*shape) for shape in shapes)

    def new_cache(self):
        """() -> an empty cache."""
        where = None if self._mesh is None else NamedSharding(self._mesh, self._cache_parts[0])
        init = jax.jit(lambda: self._spec.init(self._num_pages), out_shardings=where)
        return self._get(("cache",), lambda: init.lower())

    def set_counts(self):
        """(state, slot, counts [V]) -> state with that slot's counts replaced; the state is donated."""
        return self._state_setter("counts", jnp.int32)

    def set_bias(self):
        """(state, slot, bias [V]) -> state with that slot's biases replaced; the state is donated."""
        return self._state_setter("bias", jnp.float32)

    def _state_setter(self, field: str, dtype: DTypeLike):
        def set_row(state: SamplerState, slot: Int[Array, ""], row: Array) -> SamplerState:
            return state._replace(**{field: getattr(state, field).at[slot].set(row)})

        return self._get(
            ("set", field),
            lambda: self._lower(
                set_row,
                (self._state(), self._state_parts),
                (jax.ShapeDtypeStruct((), jnp.int32), EVERYWHERE),
                (jax.ShapeDtypeStruct((self.vocab_size,), dtype), partition(("vocab",), field)),
                out_specs=self._state_parts,
                donate=(0,),
            ),
        )

    def _lower_score(self, num_tokens: int):
        def run(head_params, hidden: Float[Array, "T D"], targets: Int[Array, " T"]) -> Logprobs:
            head = self._head.merge(head_params)
            rows = min(_SCORE_ROWS, num_tokens)
            pad = -num_tokens % rows
            hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, rows, hidden.shape[1])
            targets = jnp.pad(targets, (0, pad)).reshape(-1, rows)
            scores = jax.lax.map(lambda x: logprobs_of(head.logits(x[0]), x[1]), (hidden, targets))
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], scores)

        return self._lower(
            run,
            (self._head.shapes, self._head.parts),
            (jax.ShapeDtypeStruct((num_tokens, self.hidden_size), self._dtype), EVERYWHERE),
            (jax.ShapeDtypeStruct((num_tokens,), jnp.int32), EVERYWHERE),
            out_specs=EVERYWHERE,
        )
