"""The requests of a batch that are inside the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxinfer.batch.lines import BatchLine
from jaxinfer.engine.request import RequestOutput, SamplingParams
from jaxinfer.media.item import MediaItem
from jaxinfer.media.processor import ImageProcessor
from jaxinfer.protocol.prompt import PreparedRequest
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer


@runtime_checkable
class Engine(Protocol):
    """The part of jaxinfer.engine.engine.Engine that a batch needs."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        media: Iterable[MediaItem] = (),
    ) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def abort_request(self, request_id: str) -> None: ...


@runtime_checkable
class Model(Protocol):
    """The part of jaxinfer.LLM that a batch needs; named so that nothing here imports JAX."""

    @property
    def engine(self) -> Engine: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def image_processor(self) -> ImageProcessor | None: ...
    @property
    def model_name(self) -> str: ...
    @property
    def generation_defaults(self) -> Mapping[str, Any]: ...


@dataclass(eq=False)
class Job:
    """One line in the engine: an engine request for each of its prompts.

    Attributes:
      place: in the output, from 0.
      outputs: one a prompt, None until that one is finished.
    """

    place: int
    line: BatchLine
    prepared: PreparedRequest
    outputs: list[RequestOutput | None] = field(default_factory=list)

    @property
    def load(self) -> int:
        """Sequences it puts into the engine."""
        return len(self.prepared.prompts) * self.prepared.params.n


class InFlight:
    """Adds jobs to the engine, steps it, and hands back the jobs that are done.

    Attributes:
      load: sequences in the engine.
      generated_tokens: tokens generated so far, over all jobs.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._requests: dict[str, tuple[Job, int]] = {}
        self._token_counts: dict[str, int] = {}
        self.load = 0
        self.generated_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, job: Job) -> None:
        """Puts all prompts of a job into the engine, or none.

        Raises:
          RequestError: from the engine.
        """
        added: list[str] = []
        request = job.prepared.request
        job.outputs = [None] * len(job.prepared.prompts)
        try:
            for i, prompt in enumerate(job.prepared.prompts):
                request_id = f"{job.line.id}-{i}"
                self._engine.add_request(
                    request_id,
                    prompt.token_ids,
                    job.prepared.params,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    media=prompt.media,
                )
                added.append(request_id)
        except BaseException:
            for request_id in added:
                self._engine.abort_request(request_id)
            raise
        for i, request_id in enumerate(added):
            self._requests[request_id] = (job, i)
            self._token_counts[request_id] = 0
        self.load += job.load

    def step(self) -> list[Job]:
        """One engine step; returns the jobs whose last prompt finished in it."""
        done: list[Job] = []
        for output in self._engine.step():
            if output.request_id not in self._requests:
                continue
            tokens = sum(len(completion.token_ids) for completion in output.outputs)
            self.generated_tokens += tokens - self._token_counts[output.request_id]
            self._token_counts[output.request_id] = tokens
            if output.finished:
                del self._token_counts[output.request_id]
                job, i = self._requests.pop(output.request_id)
                job.outputs[i] = output
                if all(o is not None for o in job.outputs):
                    self.load -= job.load
                    done.append(job)
        return done

    def abort(self) -> None:
        """Takes everything out of the engine."""
        for request_id in self._requests:
            self._engine.abort_request(request_id)
        self._requests.clear()
        self._token_counts.clear()
        self.load = 0
