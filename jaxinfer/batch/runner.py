"""Runs a batch: lines in, result lines out, a bounded number of sequences in the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.batch import results
from jaxinfer.batch.engine import InFlight, Job, Model
from jaxinfer.batch.lines import BatchLine, InputLine, LineParser
from jaxinfer.batch.output import OrderedOutput
from jaxinfer.errors import RequestError
from jaxinfer.protocol.errors import SERVER_ERROR, error_object, request_error_object
from jaxinfer.protocol.images import ImageOptions
from jaxinfer.protocol.prompt import PreparedRequest, prepare
from jaxinfer.protocol.request import GenerationRequest
from jaxinfer.protocol.response import failure_of
from jaxinfer.protocol.sampling import model_defaults

PLAIN_DEFAULTS: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 128}
MAX_IN_FLIGHT = 256


@dataclass(slots=True)
class BatchProgress:
    """Counts so far. A resumed run counts the lines that were answered before as done, and in `kept`."""

    done: int = 0
    failed: int = 0
    kept: int = 0
    generated_tokens: int = 0
    interrupted: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / max(time.monotonic() - self.started, 1e-9)


def run_batch(
    llm: Model,
    lines: Iterable[InputLine],
    output: OrderedOutput,
    *,
    defaults: Mapping[str, Any] | None = None,
    max_in_flight: int = MAX_IN_FLIGHT,
    endpoint: str | None = None,
    prepare_request: Callable[[GenerationRequest], PreparedRequest] | None = None,
    on_progress: Callable[[BatchProgress], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> BatchProgress:
    """Answers every line, or until `should_stop`, and returns the counts.

    Args:
      lines: read as there is room for them, so at most about max_in_flight are held.
      defaults: request fields for lines that do not set them (the command line's flags).
      max_in_flight: sequences (prompts times n) in the engine; one larger request runs alone.
      endpoint: the one url that lines in OpenAI's form may name; None for any that is known.
      prepare_request: what makes a line's request ready for the engine, and raises RequestError for one that may not run;
        None: `jaxinfer.protocol.prompt.prepare`.
      on_progress: called after each step of the engine.
      should_stop: asked before each step; when true the unfinished requests are dropped and `interrupted` is set.

    Raises:
      ConfigError: the output belongs to another input.
    """
    run = _Run(llm, output, defaults or {}, max_in_flight, endpoint, prepare_request)
    return run.run(iter(lines), on_progress, should_stop)


class _Run:
    def __init__(
        self,
        llm: Model,
        output: OrderedOutput,
        defaults: Mapping[str, Any],
        max_in_flight: int,
        endpoint: str | None,
        prepare_request: Callable[[GenerationRequest], PreparedRequest] | None,
    ):
        self._llm = llm
        self._output = output
        own = model_defaults(llm.generation_defaults)
        self._parser = LineParser({**own, **defaults}, {**own, **PLAIN_DEFAULTS, **defaults}, endpoint)
        self._flights = InFlight(llm.engine)
        self._max_in_flight = max_in_flight
        self._prepare = prepare_request or self._prepare_here
        self._progress = BatchProgress()

        self._waiting: Job | None = None  # read, but without room in the engine yet

    def run(
        self,
        lines: Iterator[InputLine],
        on_progress: Callable[[BatchProgress], None] | None,
        should_stop: Callable[[], bool],
    ) -> BatchProgress:
        jobs = self._read_jobs(lines)
        more = True
        try:
            while more or self._flights:
                if should_stop():
                    self._progress.interrupted = True
                    break
                more = more and self._admit(jobs)
                for job in self._flights.step() if self._flights else ():
                    self._settle(job)
                self._progress.generated_tokens = self._flights.generated_tokens
                if on_progress:
                    on_progress(self._progress)
            else:
                self._output.finish()
        finally:
            self._flights.abort()
        return self._progress

    def _admit(self, jobs: Iterator[Job | None]) -> bool:
        """Fills the engine; reads a bounded number of lines. False when the input has ended."""
        for _ in range(self._max_in_flight):
            try:
                job = self._waiting or next(jobs)
            except StopIteration:
                return False
            if job is not None and self._flights and self._flights.load + job.load > self._max_in_flight:
                self._waiting = job
                return True
            self._waiting = None
            if job is not None:
                self._start(job)
        return True

    def _read_jobs(self, lines: Iterator[InputLine]) -> Iterator[Job | None]:
        """Yields what is to be computed, None for a line that is settled: kept from an earlier run, or wrong."""
        for place, line in enumerate(lines):
            parsed = self._parser.parse(line)
            kept = self._output.claim(place, line)
            if kept is not None:
                self._progress.kept += 1
                self._count(results.is_failure(kept))
                yield None
            elif parsed.request is None:
                assert parsed.error is not None
                self._refuse(place, parsed, parsed.error)
                yield None
            else:
                try:
                    prepared = self._prepare(parsed.request)
                except RequestError as error:
                    self._refuse(place, parsed, error, in_body=True)
                    yield None
                else:
                    yield Job(place, parsed, prepared)

    def _prepare_here(self, request: GenerationRequest) -> PreparedRequest:
        llm = self._llm
        return prepare(
            request,
            llm.tokenizer,
            llm.chat_template,
            max_model_len=llm.max_model_len,
            vocab_size=llm.vocab_size,
            images=ImageOptions(llm.image_processor),
        )

    def _start(self, job: Job) -> None:
        try:
            self._flights.add(job)
        except RequestError as error:
            self._refuse(job.place, job.line, error, in_body=True)

    def _settle(self, job: Job) -> None:
        outputs = [output for output in job.outputs if output is not None]
        problem = next(filter(None, map(failure_of, outputs)), None)
        if problem is not None:
            result = results.failure(job.line, error_object(problem, kind=SERVER_ERROR), status=500)
        else:
            result = results.answer(
                job.line,
                job.prepared,
                outputs,
                self._llm.tokenizer,
                model=self._llm.model_name,
                created=int(time.time()),
            )
        self._output.put(job.place, results.encode(result))
        self._count(problem is not None)

    def _refuse(self, place: int, line: BatchLine, error: RequestError, *, in_body: bool = False) -> None:
        status = 400 if in_body or line.in_body else None
        result = results.failure(line, request_error_object(error), status=status)
        self._output.put(place, results.encode(result))
        self._count(True)

    def _count(self, failed: bool) -> None:
        self._progress.done += 1
        self._progress.failed += failed
