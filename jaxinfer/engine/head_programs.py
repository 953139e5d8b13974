"""The programs that make tokens and log-probabilities of hidden states: what the devices with a model's output head run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.engine.executables import ExecutableStore
from jaxinfer.engine.layout import ROW_FLOATS, ROW_INTS
from jaxinfer.engine.modules import FlatModule
from jaxinfer.engine.programs import CompiledPrograms
from jaxinfer.engine.sampling import Logprobs, RowParams, SamplerState, logprobs_of, sample
from jaxinfer.models.base import DecoderModel
from jaxinfer.parallel.mesh import partition
from jaxinfer.parallel.programs import EVERYWHERE, abstract_on, put

_SCORE_ROWS = 64  # prompt positions whose logits exist at once


class HeadPrograms(CompiledPrograms):
    """Compiled `sample` and `score` programs of a model, and those that set the sampler's state."""

    def __init__(self, model: DecoderModel, num_slots: int, mesh: Mesh | None, store: ExecutableStore | None):
        super().__init__(mesh, store)
        self._head = None if model.output_head is None else FlatModule(model.output_head, mesh)
        self._num_slots = num_slots
        self.vocab_size: int = model.config.vocab_size
        self.hidden_size: int = model.config.hidden_size
        self.dtype = model.compute_dtype
        by_token = partition((None, "vocab"), "sampler state")
        self._state_parts = SamplerState._make([by_token, by_token, EVERYWHERE])

    def sample(self, count: int, full: bool):
        """(head params, hidden [S, D], last_tokens, rows [S, 11], want_logprobs, state | None) ->
        (tokens [S], last_tokens, Logprobs | None, state | None).

        full: penalties, biases and log-probabilities, which need the state. last_tokens and state are donated.
        """
        return self._get(("sample", count, full), lambda: self._lower_sample(count, full))

    def score(self, num_tokens: int):
        """(head params, hidden [T, D], targets [T]) -> Logprobs of each position's target."""
        return self._get(("score", num_tokens), lambda: self._lower_score(num_tokens))

    def fresh_state(self) -> SamplerState:
        """The per-slot state that a full sample needs: nothing counted, biased or forbidden. Made without a compile."""
        fills = SamplerState._make([0, 0, -1])
        return jax.tree.map(
            lambda s, fill: put(np.full(s.shape, fill, s.dtype), s.sharding),
            abstract_on(self.mesh, self._state(), self._state_parts),
            fills,
        )

    def _state(self) -> SamplerState:
        by_token, words = (self._num_slots, self.vocab_size), (self._num_slots, -(-self.vocab_size // 32))
        shapes = [(by_token, jnp.int32), (by_token, jnp.float32), (words, jnp.int32)]
        return SamplerState._make(jax.ShapeDtypeStruct(*shape) for shape in shapes)

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
        flat = self._head
        assert flat is not None

        def run(head_params, hidden: Float[Array, "T D"], targets: Int[Array, " T"]) -> Logprobs:
            head = flat.merge(head_params)
            rows = min(_SCORE_ROWS, num_tokens)
            pad = -num_tokens % rows
            hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, rows, hidden.shape[1])
            targets = jnp.pad(targets, (0, pad)).reshape(-1, rows)
            scores = jax.lax.map(lambda x: logprobs_of(head.logits(x[0]), x[1]), (hidden, targets))
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], scores)

        return self._lower(
            run,
            (flat.shapes, flat.parts),
            (jax.ShapeDtypeStruct((num_tokens, self.hidden_size), self.dtype), EVERYWHERE),
            (jax.ShapeDtypeStruct((num_tokens,), jnp.int32), EVERYWHERE),
            out_specs=EVERYWHERE,
        )

    def _lower_sample(self, count: int, full: bool):
        flat = self._head
        assert flat is not None

        def run(
            head_params,
            hidden: Float[Array, "S D"],
            last_tokens: Int[Array, " slots"],
            row_bits: Int[Array, "S 11"],
            want_logprobs: Bool[Array, ""],
            state: SamplerState | None,
        ):
            head = flat.merge(head_params)
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
            (flat.shapes, flat.parts),
            (jax.ShapeDtypeStruct((count, self.hidden_size), self.dtype), EVERYWHERE),
            (jax.ShapeDtypeStruct((self._num_slots,), jnp.int32), EVERYWHERE),
            (jax.ShapeDtypeStruct((count, len(ROW_INTS) + len(ROW_FLOATS)), jnp.int32), EVERYWHERE),
            (jax.ShapeDtypeStruct((), jnp.bool_), EVERYWHERE),
            (self._state(), self._state_parts) if full else (None, EVERYWHERE),
            out_specs=(EVERYWHERE, EVERYWHERE, EVERYWHERE, self._state_parts if full else EVERYWHERE),
            donate=(2, 5),
        )
