"""/v1/batches: OpenAI's batch API. The batch runner of `jaxinfer run` answers the lines, through the server's own engine.

A batch is a JSON file; its results grow in a file beside it, in input order. After a restart every batch that was not done goes
on where it was. One batch runs at a time, behind all online requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from jaxinfer.batch import results
from jaxinfer.batch.lines import ENDPOINTS, read_lines
from jaxinfer.batch.output import OrderedOutput
from jaxinfer.batch.runner import BatchProgress, run_batch
from jaxinfer.engine.request import RequestOutput, SamplingParams
from jaxinfer.engine.service import EngineFailure, RequestStream
from jaxinfer.errors import JaxinferError, OverloadError, RequestError
from jaxinfer.protocol.strict_json import Fields
from jaxinfer.server.body import read_json
from jaxinfer.server.context import CONTEXT, ServerContext
from jaxinfer.server.errors import HTTPFailure
from jaxinfer.server.files import FileStore, page
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_ID = re.compile(r"batch_[0-9a-f]{24}")
_WINDOW_S = 24 * 3600
_BEHIND = 1 << 20  # added to the priority of every line: online requests go first
_MAX_IN_FLIGHT = 64
_UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


class BatchStore:
    """The batches of a server and the thread that runs them."""

    def __init__(self, context: ServerContext, files: FileStore, root: Path):
        self._context = context
        self._files = files
        self._root = root / "batches"
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._cancelled: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)

    def start(self) -> None:
        """Starts the thread, for the running event loop; batches that were not done go on."""
        self._loop = asyncio.get_running_loop()
        for batch in sorted(self.all(), key=lambda b: b["created_at"]):
            if batch["status"] in _UNFINISHED:
                self._queue.put(batch["id"])
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread; the batch it is at goes on after the next start."""
        self._stopping.set()
        self._queue.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def create(self, input_file_id: str, endpoint: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        self._files.describe(input_file_id)
        now = int(time.time())
        stages = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        batch = {
            "id": f"batch_{secrets.token_hex(12)}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": input_file_id,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + _WINDOW_S,
            **{f"{stage}_at": None for stage in stages},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": dict(metadata) or None,
        }
        self._write(batch)
        self._queue.put(batch["id"])
        return batch

    def get(self, batch_id: str) -> dict[str, Any]:
        """HTTPFailure 404 when there is none."""
        path = self._root / f"{batch_id}.json"
        if not _ID.fullmatch(batch_id) or not path.is_file():
            raise HTTPFailure(404, f"no batch {batch_id[:80]!r}", param="batch_id", code="batch_not_found")
        return json.loads(path.read_bytes())

    def all(self) -> list[dict[str, Any]]:
        """Newest first."""
        found = [json.loads(path.read_bytes()) for path in self._root.glob("batch_*.json")]
        return sorted(found, key=lambda b: (b["created_at"], b["id"]), reverse=True)

    def cancel(self, batch_id: str) -> dict[str, Any]:
        with self._lock:
            batch = self.get(batch_id)
            if batch["status"] not in _UNFINISHED:
                raise RequestError(
                    f"the batch is {batch['status']}: there is nothing to cancel", param="batch_id"
                )
            self._cancelled.add(batch_id)
            return self._write({**batch, "status": "cancelling", "cancelling_at": int(time.time())})

    # The thread

    def _run(self) -> None:
        while (batch_id := self._queue.get()) is not None and not self._stopping.is_set():
            try:
                self._run_one(batch_id)
            except Exception as error:
                logger.exception("batch %s failed", batch_id)
                said = str(error) if isinstance(error, JaxinferError | HTTPFailure) else "internal error"
                self._update(
                    batch_id,
                    "failed",
                    errors={"object": "list", "data": [{"code": "batch_failed", "message": said}]},
                )

    def _run_one(self, batch_id: str) -> None:
        batch = self.get(batch_id)
        cancelled = batch["status"] == "cancelling"
        source = self._files.content(batch["input_file_id"])
        with source.open("rb") as stream:
            total = sum(1 for _ in read_lines(stream))
        results_path = self._root / f"{batch_id}.results.jsonl"
        counts = {"total": total, "completed": 0, "failed": 0}
        if not cancelled:
            self._update(batch_id, "in_progress", request_counts=counts)
        engine = _ServiceEngine(self._context, self._loop, self._stopping)
        last_written = 0.0

        def on_progress(progress: BatchProgress) -> None:
            nonlocal last_written, counts
            counts = {**counts, "completed": progress.done - progress.failed, "failed": progress.failed}
            if time.monotonic() - last_written > 1:
                last_written = time.monotonic()
                self._update(batch_id, None, request_counts=counts)

        def should_stop() -> bool:
            return self._stopping.is_set() or batch_id in self._cancelled

        output = OrderedOutput(results_path)
        try:
            if not cancelled:
                with source.open("rb") as stream:
                    run_batch(
                        _BatchModel(self._context, engine),
                        read_lines(stream),
                        output,
                        max_in_flight=_MAX_IN_FLIGHT,
                        endpoint=batch["endpoint"],
                        on_progress=on_progress,
                        should_stop=should_stop,
                    )
        finally:
            output.close()
        if self._stopping.is_set() and batch_id not in self._cancelled:
            return
        cancelled = cancelled or batch_id in self._cancelled
        if not cancelled:
            self._update(batch_id, "finalizing", request_counts=counts)
        self._finish(batch_id, results_path, "cancelled" if cancelled else "completed", total)

    def _finish(self, batch_id: str, results_path: Path, status: str, total: int) -> None:
        """Sorts results into OpenAI's two files, answers and errors, and says that the batch is over."""
        counts = {"total": total, "completed": 0, "failed": 0}
        ids: dict[str, str | None] = {}
        with self._files.new() as answers, self._files.new() as errors:
            with answers.content.open("wb") as good, errors.content.open("wb") as bad:
                if results_path.exists():
                    with results_path.open("rb") as lines:
                        for line in lines:
                            failed = results.is_failure(line)
                            counts["failed" if failed else "completed"] += 1
                            (bad if failed else good).write(line)
            for name, new, count in (
                ("output", answers, counts["completed"]),
                ("error", errors, counts["failed"]),
            ):
                made = new.finish(f"{batch_id}_{name}.jsonl", "batch_output")["id"] if count else None
                ids[f"{name}_file_id"] = made
        self._update(batch_id, status, request_counts=counts, **ids)
        results_path.unlink(missing_ok=True)

    def _update(self, batch_id: str, status: str | None, **changes: Any) -> None:
        with self._lock:
            batch = {**self.get(batch_id), **changes}
            if status is not None and not (batch["status"] == "cancelling" and status in _UNFINISHED):
                batch |= {"status": status, f"{status}_at": int(time.time())}
            self._write(batch)

    def _write(self, batch: dict[str, Any]) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile("w", dir=self._root, delete=False) as file:
            file.write(json.dumps(batch))
        os.replace(file.name, self._root / f"{batch['id']}.json")
        return batch


class _BatchModel:
    """The server's model as the batch runner asks for it."""

    def __init__(self, context: ServerContext, engine: _ServiceEngine):
        model = context.model
        self.engine = engine
        self.tokenizer: Tokenizer | None = model.tokenizer
        self.chat_template: ChatTemplate | None = model.chat_template
        self.max_model_len = model.max_model_len
        self.vocab_size = model.vocab_size
        self.model_name = model.name
        self.generation_defaults = model.defaults


class _ServiceEngine:
    """The server's engine as the batch runner asks for it: called on the batches' thread, served on the event loop."""

    def __init__(self, context: ServerContext, loop: asyncio.AbstractEventLoop, stopping: threading.Event):
        self._service = context.service
        self._loop = loop
        self._stopping = stopping
        self._done: queue.SimpleQueue[RequestStream] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        async def submit() -> RequestStream:
            stream = await self._service.submit(
                f"{request_id}-{id(self)}",
                prompt_token_ids,
                params,
                priority=min(priority + _BEHIND, 2**63 - 1),
                cache_salt=cache_salt,
            )
            stream.done.add_done_callback(lambda _: self._done.put(stream))
            return stream

        while True:
            try:
                stream = asyncio.run_coroutine_threadsafe(submit(), self._loop).result()
            except OverloadError:  # online requests have filled the engine
                if self._stopping.wait(1.0):
                    raise
            else:
                self._streams[request_id] = stream
                return

    def step(self) -> list[RequestOutput]:
        """Waits a moment for requests to end; those that have."""
        try:
            streams = [self._done.get(timeout=0.1)]
        except queue.Empty:
            return []
        while not self._done.empty():
            streams.append(self._done.get())
        ended = []
        for stream in streams:
            request_id = stream.request_id.removesuffix(f"-{id(self)}")
            if self._streams.pop(request_id, None) is None:
                continue
            if stream.done.cancelled() or stream.done.exception() is not None:
                raise EngineFailure(f"the engine gave up: {stream.done.exception()}")
            assert stream.output is not None
            stream.output.request_id = request_id
            ended.append(stream.output)
        return ended

    def abort_request(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._loop.call_soon_threadsafe(self._service.abort, stream)


# Routes


def batches_of(request: web.Request) -> BatchStore:
    store = request.app[CONTEXT].batches
    if store is None:
        raise HTTPFailure(
            400, "this server keeps no batches: start it with --data-dir DIR", code="files_not_enabled"
        )
    return store


async def create(request: web.Request) -> web.Response:
    fields = Fields(await read_json(request))
    store = batches_of(request)
    endpoint, input_file = fields.string("endpoint"), fields.string("input_file_id")
    if endpoint not in ENDPOINTS:
        raise fields.error("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    if input_file is None:
        raise fields.error("input_file_id", "is missing")
    if fields.string("completion_window", "24h") != "24h":
        raise fields.error("completion_window", "must be 24h")
    metadata = fields.object("metadata")
    if len(metadata) > 16 or not all(isinstance(v, str) and len(v) <= 512 for v in metadata.values()):
        raise fields.error("metadata", "may hold 16 texts of at most 512 characters")
    return web.json_response(store.create(input_file, endpoint, metadata))


async def retrieve(request: web.Request) -> web.Response:
    return web.json_response(batches_of(request).get(request.match_info["batch_id"]))


async def listing(request: web.Request) -> web.Response:
    return web.json_response(page(batches_of(request).all(), request))


async def cancel(request: web.Request) -> web.Response:
    return web.json_response(batches_of(request).cancel(request.match_info["batch_id"]))
