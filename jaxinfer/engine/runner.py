"""The device side of the engine: owns parameters, cache and sampler state, and dispatches steps without waiting for them.

One thread owns a ModelRunner: the cache is donated to each step, so its old handle is dead as soon as a step is dispatched.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer import compat
from jaxinfer.engine.batch import StepInputs
from jaxinfer.engine.sampling import Logprobs, SamplerState
from jaxinfer.engine.steps import StepPrograms
from jaxinfer.media.item import MediaItem
from jaxinfer.weights.load import Params


@dataclass(slots=True)
class Dispatched:
    """A step on its way: device values that the host reads later.

    Attributes:
      tokens: [S], in the order of StepArrays.sampled; -1 where the logits held a NaN.
      logprobs: of those tokens, when asked for.
      hidden: [T, D], for `score`.
    """

    tokens: jax.Array | None
    logprobs: Logprobs | None
    hidden: jax.Array


class ModelRunner:
    """Parameters, KV cache and per-slot state of one model replica."""

    def __init__(
        self,
        programs: StepPrograms,
        params: Params,
        cache: tuple[jax.Array, ...],
        num_slots: int,
    ):
        self.programs = programs
        self._params, self._tower_params = params[: programs.num_params], params[programs.num_params :]
        self._head = programs.head_params(params)
        self._cache = cache
        self._last_tokens = programs.put(np.zeros(num_slots, np.int32))
        media = programs.media_shape()
        self._media = None if media is None else programs.put(np.zeros(media.shape, media.dtype))
        self._state: SamplerState | None = None  # made when a request first needs it
        # A CPU's arrays are read where they are, and the end of a copy calls into Python, which may be gone by then.
        self._copies = compat.platform() != "cpu"
        self._flags = {flag: programs.put(np.bool_(flag)) for flag in (False, True)}

    def dispatch(self, arrays: StepInputs, *, logprobs: bool) -> Dispatched:
        """Starts a step and the copy of its tokens to the host. logprobs implies arrays.full."""
        forward = self.programs.forward(arrays.bucket)
        hidden, rows, self._cache = forward(
            self._params, self._cache, self._last_tokens, arrays.ints, self._media
        )
        if not arrays.samples:
            return Dispatched(None, None, hidden)
        state = self._sampler_state() if arrays.full else None
        sample = self.programs.sample(arrays.bucket.samples, arrays.full)
        tokens, self._last_tokens, scores, state = sample(
            self._head,
            rows,
            self._last_tokens,
            arrays.rows,
            self._flags[logprobs],
            state,
        )
        if arrays.full:
            self._state = state
        if self._copies:
            tokens.copy_to_host_async()
        return Dispatched(tokens, scores if logprobs else None, hidden)

    def encode(self, item: MediaItem, rows: list[int]) -> None:
        """Starts an image's way through the vision tower, into these rows of the media buffer."""
        start = 0
        tower = self.programs.tower
        assert tower is not None
        for batch in tower.batches(item.pixel_values, item.grid_thw):
            index = np.full(tower.num_rows(batch.size), np.iinfo(np.int32).max, np.int32)
            index[: batch.num_rows] = rows[start : start + batch.num_rows]
            start += batch.num_rows
            encode = self.programs.encode(batch.size)
            self._media = encode(self._tower_params, self._media, batch.arrays, index)

    def score(self, step: Dispatched, targets: np.ndarray) -> Logprobs:
        """Log-probabilities of `targets` [T] given each of a step's hidden states."""
        return self.programs.score(targets.shape[0])(self._head, step.hidden, targets)

    def set_counts(self, slot: int, counts: np.ndarray) -> None:
        """Replaces a slot's penalty counts, int32 [V] as in SamplerState."""
        self._state = self.programs.set_counts()(self._sampler_state(), np.int32(slot), counts)

    def set_bias(self, slot: int, bias: np.ndarray) -> None:
        """Replaces what is added to a slot's logits, float32 [V]."""
        self._state = self.programs.set_bias()(self._sampler_state(), np.int32(slot), bias)

    def set_allowed(self, allowed: np.ndarray) -> None:
        """Replaces every slot's allowed tokens, int32 [slots, V / 32] as in SamplerState. The array must not change afterwards."""
        self._state = self._sampler_state()._replace(allowed=self.programs.put(allowed))

    def wait(self) -> None:
        """Returns when the device has finished everything dispatched so far."""
        jax.block_until_ready((self._cache, self._last_tokens, self._state))

    def _sampler_state(self) -> SamplerState:
        if self._state is None:
            self._state = self.programs.fresh_state()
        return self._state
