"""The engine's loop: schedule, dispatch, read the step before. One thread calls it.

The loop is asynchronous: a step is dispatched before the tokens of the step before it are read, so the device never
waits for the host. A sequence that ends is therefore noticed one step late; the token of the extra step is dropped.
"""

from __future__ import annotations

import dataclasses
import random
import time
import weakref
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass

import numpy as np

from jaxinfer.config.engine import EngineConfig
from jaxinfer.engine.batch import BatchBuilder, StepArrays
from jaxinfer.engine.buckets import BucketTable
from jaxinfer.engine.completion import Completion, RequestState
from jaxinfer.engine.constraint import GrammarCompiler, Matcher
from jaxinfer.engine.media import MediaRows, PromptMedia, place_media
from jaxinfer.engine.microbatch import split_step
from jaxinfer.engine.request import (
    CompletionOutput,
    EngineLoad,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    check_request,
)
from jaxinfer.engine.rules import TokenRules, penalty_counts, uses_penalties
from jaxinfer.engine.runner import Dispatched, ModelRunner
from jaxinfer.engine.sampling import Logprobs
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import PrefillChunk, Sequence, Step
from jaxinfer.errors import RequestError
from jaxinfer.kv.manager import KVManager
from jaxinfer.media.item import MediaItem
from jaxinfer.text.detokenizer import IncrementalDetokenizer
from jaxinfer.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _InFlight:
    """A step, or a microbatch of one.

    Attributes:
      scored: chunks whose prompt tokens are scored, and the first row of each in the scores.
    """

    arrays: StepArrays
    step: Dispatched
    scored: list[tuple[PrefillChunk, int]]


class Engine:
    """Continuous batching over one model replica.

    Callers add requests at any time and call `step` until `has_unfinished_requests()` is false. Not thread-safe.

    Attributes:
      num_steps: steps dispatched so far.
      scheduler: what is waiting and running; read it, but leave it alone.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv: KVManager | list[KVManager],
        buckets: BucketTable,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: Set[int],
        vocab_size: int,
        table_width: int,
        image_token_id: int | None = None,
        async_depth: int = 1,
        microbatches: int = 1,
    ):
        """
        Args:
          kv: of each lane of `buckets`.
          image_token_id: as in ModelConfig, of models whose vision tower the runner has.
          async_depth: steps dispatched beyond the one being read; 0 reads each step before the next.
          microbatches: most parts that a step is cut into, as many as the runner has stages.
        """
        self.config = config
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=config.max_num_seqs,
            max_prefill_tokens=buckets.lane_blocks * config.prefill_block,
            max_lane_seqs=buckets.lane_rows,
            prefill_block=config.prefill_block,
            max_waiting=config.max_waiting,
            media_rows=None if image_token_id is None else MediaRows(config.max_media_tokens),
        )
        self.num_steps = 0
        self._image_token = image_token_id
        self._runner = runner
        self._builder = BatchBuilder(
            buckets,
            num_slots=config.max_num_seqs + 1,
            groups=len(self.scheduler.kv.groups),
            table_width=table_width,
            vocab_size=vocab_size,
        )
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._depth = async_depth
        self._requests: dict[str, RequestState] = {}
        self._microbatches = microbatches
        self._in_flight: deque[list[_InFlight]] = deque()  # the parts of each step
        self._biased_slots: set[int] = set()  # slots whose bias row on the device is not zero
        self._allowed = np.full((config.max_num_seqs + 1, -(-vocab_size // 32)), -1, np.int32)
        self._constrained_slots: set[int] = set()  # slots whose row of it is not all ones
        self._allowed_changed = False
        self.grammars = None if tokenizer is None else GrammarCompiler(tokenizer, vocab_size, self._eos)
        self._next_id = 0
        self._generated = self._prefilled = 0  # tokens since the start
        # A process must not end while the device computes: XLA's threads release Python objects when they finish.
        weakref.finalize(self, runner.wait)

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        scheduler = self.scheduler
        pools = [kv.pool for kv in scheduler.lanes]
        return EngineLoad(
            waiting=len(scheduler.waiting),
            running=len(scheduler.prefilling) + len(scheduler.decoding),
            kv_usage=1 - sum(pool.available for pool in pools) / self.num_pages,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            preemptions=scheduler.num_preemptions,
        )

    @property
    def num_pages(self) -> int:
        """Of the KV cache, but for those that padding writes to."""
        return sum(kv.pool.total for kv in self.scheduler.lanes)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        media: Iterable[MediaItem] = (),
    ) -> None:
        """Queues a request.

        Args:
          request_id: unique among unfinished requests.
          priority: lower goes first.
          cache_salt: requests with different salts share no KV pages.
          media: images, in the order of their placeholders in the prompt.
        Raises:
          RequestError: it can never be served as it is; the message says why.
          OverloadError: too many requests are waiting.
        """
        prompt_token_ids = check_request(prompt_token_ids, priority, cache_salt)
        if request_id in self._requests:
            raise RequestError(
                f"request id {request_id!r} is in use by an unfinished request", param="request_id"
            )
        self._check_prompt(prompt_token_ids)
        params.check_vocab(self._vocab_size)
        placed = self._place_media(prompt_token_ids, media)
        unscored: list[TokenLogprob | None] = [None] * len(prompt_token_ids)
        output = RequestOutput(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            outputs=[
                CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)
            ],
            prompt_logprobs=None if params.prompt_logprobs is None else unscored,
        )
        state = RequestState(output, params, unfinished=params.n)
        room = self.config.max_model_len - len(prompt_token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = random.SystemRandom().getrandbits(63) if params.seed is None else params.seed
        leader = None
        try:
            for completion in output.outputs:
                seq = self._sequence(
                    state, completion, max_tokens, seed + completion.index, priority, cache_salt, leader
                )
                if placed is not None:
                    seq.media = dataclasses.replace(placed)
                    seq.extra = placed.digest
                self.scheduler.add(seq)
                state.sequences.append(seq)
                leader = leader or seq
        except Exception:
            for seq in state.sequences:
                self.scheduler.abort(seq)
            raise
        self._requests[request_id] = state

    def abort_request(self, request_id: str) -> None:
        """Drops a request at any moment; its pages are free at once. Unknown and finished ids are ignored."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        for seq in state.sequences:
            self.scheduler.abort(seq)
            seq.request.output.finish_reason = seq.request.output.finish_reason or "abort"
        state.output.finished = True

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step if there is one, then reads an earlier one; returns the requests that changed.

        A request's RequestOutput is the same object every time. The list is empty when nothing was read.
        """
        step = self.scheduler.schedule()
        if step is not None:
            for seq in step.preempted:
                seq.request.slot = -1
            for chunk in step.prefill:
                self._prepare_slot(chunk.seq, chunk.start)
                self._prefilled += chunk.length
                output = chunk.seq.request.state.output
                if output.started is None:
                    output.started = time.perf_counter()
            for seq in step.decode:
                self._refresh_rules(seq)
            if self._allowed_changed:
                self._allowed_changed = False
                self._runner.set_allowed(self._allowed.copy())
            parts = split_step(step, self._microbatches, self.config.prefill_block)
            self._in_flight.append([self._dispatch(part) for part in parts])
            self.num_steps += 1
        if len(self._in_flight) > (self._depth if step is not None else 0):
            return self._read(self._in_flight.popleft())
        return []

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
        limit = self.config.max_model_len
        if len(prompt) + 1 > limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but prompt and at least one new token must fit into the context of {limit}",
                param="prompt",
                code="context_length_exceeded",
            )
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            bad = next(t for t in prompt if not 0 <= t < self._vocab_size)
            raise RequestError(
                f"prompt token id {bad} is outside the vocabulary of {self._vocab_size}", param="prompt"
            )

    def _place_media(self, prompt: list[int], media: Iterable[MediaItem]) -> PromptMedia | None:
        items = tuple(media)
        if not items:
            return None
        if self._image_token is None:
            raise RequestError("this model takes no images", param="messages")
        try:
            return place_media(prompt, self._image_token, items)
        except ValueError as e:
            raise RequestError(str(e), param="messages") from None

    def _sequence(
        self,
        state: RequestState,
        output: CompletionOutput,
        max_tokens: int,
        seed: int,
        priority: int,
        cache_salt: str | None,
        leader: Sequence | None,
    ) -> Sequence:
        params, prompt = state.params, state.output.prompt_token_ids
        end_ids = frozenset() if params.ignore_eos else self._eos
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop=tuple(params.stop),
                include_stop=params.include_stop_str_in_output,
                prompt_ids=prompt,
                min_tokens=params.min_tokens,
            )
        rules = None
        if TokenRules.needed(params):
            matcher = self._matcher(params)
            rules = TokenRules(params, end_ids | set(params.stop_token_ids), self._vocab_size, matcher)
        self._next_id += 1
        return Sequence(
            seq_id=self._next_id,
            tokens=list(prompt),
            num_prompt=len(prompt),
            max_total=len(prompt) + max_tokens,
            priority=priority,
            salt=(cache_salt or "").encode(),
            read_cache=params.prompt_logprobs is None,
            leader=leader,
            needs_tokens=rules is not None and rules.needs_tokens,
            request=Completion(state, output, params, detokenizer, end_ids, max_tokens, seed, rules),
        )

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        if params.constraint is None:
            return None
        if self.grammars is None or not self._eos:
            raise RequestError(
                f"{params.constraint.param} needs a tokenizer and an end-of-sequence token, and this model lacks one",
                param=params.constraint.param,
            )
        return self.grammars.compile(params.constraint)

    def _prepare_slot(self, seq: Sequence, start: int) -> None:
        """Tells builder and device about a sequence that has just been given its slot; `start`: its first token that is computed."""
        completion: Completion = seq.request
        if seq.slot != completion.slot:
            params = completion.params
            full = completion.rules is not None or uses_penalties(params) or params.logprobs is not None
            self._builder.set_row(seq.slot, params, completion.seed, full=full)
            completion.slot = seq.slot
            completion.rules_state = None
            if seq.media is not None and seq.media.rows:
                for item, rows in seq.media.needed(start):
                    self._runner.encode(item, rows)
            if completion.output.index == 0:
                completion.state.output.cached_tokens = seq.cached_tokens
            if uses_penalties(params):
                self._runner.set_counts(
                    seq.slot, penalty_counts(seq.tokens, seq.num_prompt, self._vocab_size)
                )
            if completion.rules is None and seq.slot in self._biased_slots:
                self._biased_slots.remove(seq.slot)
                self._runner.set_bias(seq.slot, np.zeros(self._vocab_size, np.float32))
            if seq.slot in self._constrained_slots:
                self._constrained_slots.remove(seq.slot)
                self._allowed[seq.slot] = -1
                self._allowed_changed = True
        self._refresh_rules(seq)

    def _refresh_rules(self, seq: Sequence) -> None:
        completion: Completion = seq.request
        rules = completion.rules
        if rules is None:
            return
        state = rules.state(seq.num_computed - seq.num_prompt, completion.output.token_ids)
        if state != completion.rules_state:
            completion.rules_state = state
            self._biased_slots.add(seq.slot)
            self._runner.set_bias(seq.slot, rules.bias(state))
        if rules.matcher is not None:
            self._allowed[seq.slot] = rules.matcher.mask(completion.output.token_ids)
            self._constrained_slots.add(seq.slot)
            self._allowed_changed = True

    def _dispatch(self, step: Step) -> _InFlight:
        arrays = self._builder.build(step)
        want_logprobs = any(seq.request.params.logprobs is not None for seq in arrays.sampled)
        dispatched = self._runner.dispatch(arrays, logprobs=want_logprobs)
        return _InFlight(arrays, dispatched, self._score_prompts(step.prefill, arrays, dispatched))

    def _score_prompts(
        self, chunks: list[PrefillChunk], arrays: StepArrays, step: Dispatched
    ) -> list[tuple[PrefillChunk, int]]:
        """Starts the log-probabilities of prompt tokens in this step's chunks, where asked for."""
        wanted = [
            (chunk, first)
            for chunk, first in zip(chunks, arrays.chunk_starts, strict=True)
            if chunk.seq.request.params.prompt_logprobs is not None and chunk.start < chunk.seq.num_prompt - 1
        ]
        if not wanted:
            return []
        targets = np.zeros(arrays.bucket.num_tokens, np.int32)
        for chunk, first in wanted:
            following = chunk.seq.tokens[chunk.start + 1 : chunk.start + chunk.length + 1]
            targets[first : first + len(following)] = following
        self._runner.score(step, targets)
        return wanted

    def _read(self, flights: list[_InFlight]) -> list[RequestOutput]:
        """Waits for a step's tokens and hands each to its sequence."""
        changed: dict[int, RequestOutput] = {}
        for flight in flights:
            if flight.scored or flight.arrays.samples:
                self._runner.complete(flight.step.number)
            for chunk, first in flight.scored:
                self._record_prompt_scores(chunk, first, flight.step.scores)
            if flight.step.tokens is not None:
                self._read_tokens(flight, changed)
        return list(changed.values())

    def _read_tokens(self, flight: _InFlight, changed: dict[int, RequestOutput]) -> None:
        tokens = np.asarray(flight.step.tokens).tolist()
        logprobs = _HostLogprobs(flight.step.logprobs) if flight.step.logprobs is not None else None
        for row, seq in enumerate(flight.arrays.sampled):
            token = tokens[row]
            if not self.scheduler.append_token(seq, token):
                continue
            completion: Completion = seq.request
            logprob = None
            if logprobs is not None and completion.params.logprobs is not None:
                logprob = logprobs.row(row, token, completion.params.logprobs)
            self._generated += token >= 0
            if completion.append(token, logprob):
                self._finish(seq)
            output = completion.state.output
            changed[id(output)] = output

    def _finish(self, seq: Sequence) -> None:
        state: RequestState = seq.request.state
        self.scheduler.finish(seq)
        state.unfinished -= 1
        if not state.unfinished:
            state.output.finished = True
            del self._requests[state.output.request_id]
            if not self._requests:
                self.scheduler.check_integrity()

    def _record_prompt_scores(self, chunk: PrefillChunk, first: int, scores: Logprobs | None) -> None:
        assert scores is not None  # the step is complete
        seq = chunk.seq
        completion: Completion = seq.request
        host = _HostLogprobs(scores)
        recorded = completion.state.output.prompt_logprobs
        assert recorded is not None
        last = min(chunk.start + chunk.length, seq.num_prompt - 1)
        for position in range(chunk.start, last):
            token = seq.tokens[position + 1]
            row = first + position - chunk.start
            recorded[position + 1] = host.row(row, token, completion.params.prompt_logprobs or 0)


class _HostLogprobs:
    """Log-probabilities of a step, on the host."""

    def __init__(self, device: Logprobs):
        self._chosen = np.asarray(device.chosen)
        self._top = np.asarray(device.top)
        self._ids = np.asarray(device.top_ids)

    def row(self, row: int, token: int, count: int) -> TokenLogprob:
        top = zip(self._ids[row, :count].tolist(), self._top[row, :count].tolist(), strict=True)
        return TokenLogprob(token, float(self._chosen[row]), list(top))
