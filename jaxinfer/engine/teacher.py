"""Teacher-forced logits and hidden states of a whole sequence, for research and tests: the model without the engine.

Runs in prefill blocks over a cache of its own, compiled for each length bucket on first use.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.errors import RequestError
from jaxinfer.kv.cache import CacheSpec, StepBatch
from jaxinfer.models.base import DecoderModel

_LENGTH_STEP = 128  # lengths are padded to a multiple of this many tokens


class TeacherForcing:
    """Computes what a model predicts at every position of given tokens."""

    def __init__(
        self, model: DecoderModel, params: tuple[jax.Array, ...], cache_spec: CacheSpec, max_len: int
    ):
        graph, state = nnx.split(model)
        treedef = jax.tree.structure(state)
        self._params = params
        self._spec = cache_spec
        self._max_len = max_len
        self._num_layers: int = model.config.num_layers
        self._vocab_size: int = model.config.vocab_size
        self._groups = len(model.page_groups)

        @functools.partial(jax.jit, static_argnames=("layers", "want_logits"), donate_argnums=2)
        def run(params, tokens, cache, batch: StepBatch, layers: tuple[int, ...], want_logits: bool):
            module = nnx.merge(graph, jax.tree.unflatten(treedef, params))
            record: dict[int, Any] = dict.fromkeys(layers)
            hidden, cache = module(tokens, batch, cache, record=record)
            logits = module.output_head.logits(hidden) if want_logits else None
            # The written cache is returned so that donating the empty one is of use.
            return logits, tuple(record[i].astype(jnp.float32) for i in layers), cache

        self._run = run

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Next-token logits of every position, float32 [T, V]."""
        logits, _, _ = self._call(token_ids, (), want_logits=True)
        assert logits is not None
        return np.asarray(logits)[: len(token_ids)]

    def hidden_states(self, token_ids: Sequence[int], layers: Sequence[int]) -> dict[int, np.ndarray]:
        """Hidden states, float32 [T, D], by layer: 0 the embeddings, i the output of layer i, the last one normalised.

        Negative numbers count from the end, as in Hugging Face's `hidden_states`.
        """
        count = self._num_layers + 1
        for layer in layers:
            if not -count <= layer < count:
                raise RequestError(
                    f"layer {layer} does not exist: this model has 0 to {count - 1}", param="layers"
                )
        wanted = tuple(layer % count for layer in layers)
        _, states, _ = self._call(token_ids, wanted, want_logits=False)
        return {layer: np.asarray(s)[: len(token_ids)] for layer, s in zip(layers, states, strict=True)}

    def _call(self, token_ids: Sequence[int], layers: tuple[int, ...], *, want_logits: bool):
        length = len(token_ids)
        if not 0 < length <= self._max_len:
            raise RequestError(f"{length} tokens do not fit: 1 to {self._max_len} do", param="token_ids")
        ids = np.asarray(token_ids, np.int32)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise RequestError(f"token ids must lie in [0, {self._vocab_size})", param="token_ids")
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
        return self._run(self._params, tokens, self._spec.init(pages + 1), batch, layers, want_logits)
