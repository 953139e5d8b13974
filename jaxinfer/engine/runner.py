"""The device side of the engine: owns parameters, cache and sampler state, and dispatches steps without waiting for them.

One thread owns a ModelRunner: the cache is donated to each step, so its old handle is dead as soon as a step is dispatched.

In a pipeline what is dispatched are microbatches. A stage is given one as soon as its turn comes (PipelineOrder), so that the last
stages get theirs only while the first ones get later ones, or when somebody asks for the result. What the sampler must know
before a microbatch waits with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxinfer import compat
from jaxinfer.engine.batch import StepInputs
from jaxinfer.engine.sampling import Logprobs, SamplerState
from jaxinfer.engine.steps import Cache, StepPrograms
from jaxinfer.media.item import MediaItem
from jaxinfer.parallel.links import Link
from jaxinfer.parallel.stages import PipelineOrder
from jaxinfer.weights.load import Params

StateUpdate = Callable[[SamplerState], SamplerState]


@dataclass(slots=True)
class Dispatched:
    """A step on its way, or a microbatch of one: device values that the host reads later. They are there once it is complete.

    Attributes:
      number: counts what was dispatched.
      after: number of the one whose tokens it needs; -1: none.
      updates: of the sampler's state, before its tokens are sampled.
      hidden: [T, D], as the stage that had it last has left them.
      tokens: [S], in the order of StepArrays.sampled; -1 where the logits held a NaN.
      logprobs: of those tokens, when asked for.
      targets, scores: what `score` is asked for, and its answer.
    """

    number: int
    inputs: StepInputs
    want_logprobs: bool
    after: int
    updates: list[StateUpdate]
    hidden: jax.Array | None = None
    tokens: jax.Array | None = None
    logprobs: Logprobs | None = None
    targets: np.ndarray | None = None
    scores: Logprobs | None = None


@dataclass(slots=True)
class RunningStage:
    """A stage's programs and what they work on."""

    programs: StepPrograms
    params: Params
    cache: Cache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = self.programs.new_cache()()


class ModelRunner:
    """Parameters, KV cache and per-slot state of one model replica.

    Attributes:
      stages: of the pipeline; one where there is none.
    """

    def __init__(self, stages: Sequence[RunningStage], tower_params: Params, num_slots: int):
        self.stages = list(stages)
        first, last = self.stages[0], self.stages[-1]
        self._tower_params = tower_params
        self._head = last.programs.head_params(last.params)
        self._last_tokens = last.programs.put(np.zeros(num_slots, np.int32))
        media = first.programs.media_shape()
        self._media = None if media is None else first.programs.put(np.zeros(media.shape, media.dtype))
        self._state: SamplerState | None = None  # made when a request first needs it
        self._updates: list[StateUpdate] = []
        # A CPU's arrays are read where they are, and the end of a copy calls into Python, which may be gone by then.
        self._copies = compat.platform() != "cpu"
        self._flags = {flag: last.programs.put(np.bool_(flag)) for flag in (False, True)}
        self._order = PipelineOrder(len(self.stages))
        self._jobs: dict[int, Dispatched] = {}  # not complete
        # The links from each stage to the next, and from the last to the first, which takes sampled tokens back.
        meshes = [stage.programs.mesh for stage in self.stages]
        self.links = [
            Link(source, target)
            for source, target in zip(meshes, meshes[1:] + meshes[:1], strict=True)
            if source is not None and target is not None and len(meshes) > 1
        ]
        self._sampled_by = np.full(num_slots, -1, np.int64)  # number of what sampled a slot's last token
        # The last tokens as they were after some of the latest microbatches, on the first stage.
        self._returned = {-1: first.programs.put(np.zeros(num_slots, np.int32))}

    def compile_links(self) -> None:
        """Builds the programs between stages."""
        for stage, link in zip(self.stages, self.links[:-1], strict=False):
            for shape in stage.programs.hidden_shapes():
                link.program(shape.shape, shape.dtype)
        if self.links:
            self.links[-1].program(self._last_tokens.shape, self._last_tokens.dtype)

    def dispatch(self, arrays: StepInputs, *, logprobs: bool) -> Dispatched:
        """Starts a step, or a microbatch of one, and the copy of its tokens to the host. logprobs implies arrays.full."""
        after = self._needs(arrays) if self.links else -1
        number = self._order.add(after)
        step = self._jobs[number] = Dispatched(number, arrays, logprobs, after, self._updates)
        self._updates = []
        if self.links and arrays.samples:
            self._sampled_by[arrays.rows[:, 0]] = number
        while not self._order.started(number):
            self._tick()
        return step

    def is_complete(self, number: int) -> bool:
        """Whether the last stage has been given this one."""
        return self._order.done(number)

    def complete(self, number: int) -> None:
        """Gives all stages what was dispatched, up to this one, if they have not had it."""
        while not self.is_complete(number):
            self._tick()

    def score(self, step: Dispatched, targets: np.ndarray) -> None:
        """Asks for the log-probabilities of `targets` [T] given each of the hidden states of the step dispatched last."""
        step.targets = targets
        if self._order.done(step.number):
            self._score(step)

    def _needs(self, arrays: StepInputs) -> int:
        """The number of what samples the latest of the tokens that these name by slot."""
        tokens = arrays.ints[: arrays.bucket.decode]
        return int(self._sampled_by[-1 - tokens[tokens < 0]].max(initial=-1))

    def _tick(self) -> None:
        """Every stage that can goes on to its next microbatch; then all send what they have made.

        Both ends of a link must come to it in one order, and a stage must not wait there for another to finish what it has just begun.
        """
        work = [(stage, self._jobs[number]) for stage, number in self._order.tick()]
        for stage, step in work:
            self._compute(stage, step)
        for stage, step in work if self.links else ():
            self._send(stage, step)

    def _compute(self, index: int, step: Dispatched) -> None:
        stage, inputs = self.stages[index], step.inputs
        entering = step.hidden if index else self._tokens_after(step.after)
        forward = stage.programs.forward(inputs.bucket)
        step.hidden, rows, stage.cache = forward(
            stage.params, stage.cache, entering, inputs.ints, None if index else self._media
        )
        if index < len(self.stages) - 1:
            return
        del self._jobs[step.number]
        for update in step.updates:
            self._state = update(self._sampler_state())
        if inputs.samples:
            self._sample(step, rows)
        if step.targets is not None:
            self._score(step)

    def _sample(self, step: Dispatched, rows: jax.Array) -> None:
        inputs = step.inputs
        state = self._sampler_state() if inputs.full else None
        sample = self.stages[-1].programs.sample(inputs.bucket.samples, inputs.full)
        tokens, self._last_tokens, scores, state = sample(
            self._head, rows, self._last_tokens, inputs.rows, self._flags[step.want_logprobs], state
        )
        step.tokens = tokens
        if inputs.full:
            self._state = state
        if step.want_logprobs:
            step.logprobs = scores
        if self._copies:
            tokens.copy_to_host_async()

    def _score(self, step: Dispatched) -> None:
        assert step.targets is not None
        score = self.stages[-1].programs.score(step.targets.shape[0])
        step.scores = score(self._head, step.hidden, step.targets)

    def _send(self, index: int, step: Dispatched) -> None:
        if index < len(self.stages) - 1:
            assert step.hidden is not None
            step.hidden = self.links[index].send(step.hidden)
        elif step.inputs.samples:
            self._returned[step.number] = self.links[-1].send(self._last_tokens)
            if len(self._returned) > 2 * len(self.stages):
                del self._returned[next(iter(self._returned))]

    def _tokens_after(self, number: int) -> jax.Array:
        """The last tokens once a microbatch has sampled. Later ones do as well: a token is needed before its slot gets another."""
        if not self.links:
            return self._last_tokens
        return next(tokens for sampled, tokens in self._returned.items() if sampled >= number)

    def encode(self, item: MediaItem, rows: list[int]) -> None:
        """Starts an image's way through the vision tower, into these rows of the media buffer."""
        start = 0
        programs = self.stages[0].programs
        tower = programs.tower
        assert tower is not None
        for batch in tower.batches(item.pixel_values, item.grid_thw):
            index = np.full(tower.num_rows(batch.size), np.iinfo(np.int32).max, np.int32)
            index[: batch.num_rows] = rows[start : start + batch.num_rows]
            start += batch.num_rows
            encode = programs.encode(batch.size)
            self._media = encode(self._tower_params, self._media, batch.arrays, index)

    def set_counts(self, slot: int, counts: np.ndarray) -> None:
        """Replaces a slot's penalty counts, int32 [V] as in SamplerState."""
        put = self.stages[-1].programs.set_counts
        self._updates.append(lambda state: put()(state, np.int32(slot), counts))

    def set_bias(self, slot: int, bias: np.ndarray) -> None:
        """Replaces what is added to a slot's logits, float32 [V]."""
        put = self.stages[-1].programs.set_bias
        self._updates.append(lambda state: put()(state, np.int32(slot), bias))

    def set_allowed(self, allowed: np.ndarray) -> None:
        """Replaces every slot's allowed tokens, int32 [slots, V / 32] as in SamplerState. The array must not change afterwards."""
        put = self.stages[-1].programs.put
        self._updates.append(lambda state: state._replace(allowed=put(allowed)))

    def wait(self) -> None:
        """Returns when the devices have finished everything they were given so far."""
        jax.block_until_ready(([stage.cache for stage in self.stages], self._last_tokens, self._state))

    def _sampler_state(self) -> SamplerState:
        if self._state is None:
            self._state = self.stages[-1].programs.fresh_state()
        return self._state
