"""/v1/batches: OpenAI's batch API. The batch runner of `jaxinfer run` answers the lines, through the server's own engine.

A batch is a JSON file; its results grow in a file beside it, in input order. After a restart every batch that was not done goes
on where it was. One batch runs at a time, behind all online requests. Batches do not expire.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
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
from jaxinfer.batch.lines import read_lines
from jaxinfer.batch.output import OrderedOutput, journal_of, read_results
from jaxinfer.batch.runner import BatchProgress, run_batch
from jaxinfer.engine.service import EngineFailure
from jaxinfer.errors import RequestError
from jaxinfer.protocol.convert import read, read_object
from jaxinfer.protocol.types import BatchBody
from jaxinfer.protocol.unsupported import BATCHES, refuse_unsupported
from jaxinfer.server.batch_engine import ServedBatchModel, Stopped
from jaxinfer.server.body import read_json
from jaxinfer.server.context import CONTEXT, ServerContext
from jaxinfer.server.errors import HTTPFailure
from jaxinfer.server.files import FileStore, page

logger = logging.getLogger(__name__)

_ID = re.compile(r"batch_[0-9a-f]{24}")
_MAX_IN_FLIGHT = 64
_MAX_QUEUED = 1000  # batches
_UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


class BatchStore:
    """The batches of a server and the thread that runs them."""

    def __init__(self, context: ServerContext, files: FileStore, root: Path):
        self._context = context
        self._files = files
        self._root = root / "batches"
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in self._root.glob("new-*"):  # of a write that was cut off
            leftover.unlink()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._running: str | None = None
        self._cancelled = threading.Event()  # the one that is running
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)

    def start(self) -> None:
        """Starts the thread, for the running event loop; batches that were not done go on."""
        self._loop = asyncio.get_running_loop()
        for batch in reversed(self.all()):
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
        """HTTPFailure 404 for a file that is not there, 413 when there is no room for results, 429 when too many wait."""
        purpose = self._files.describe(input_file_id)["purpose"]
        if purpose != "batch":
            raise RequestError(
                f"the file's purpose is {purpose}: upload it with purpose batch", param="input_file_id"
            )
        self._files.take(0)
        if self._queue.qsize() >= _MAX_QUEUED:
            raise HTTPFailure(
                429, f"{_MAX_QUEUED} batches wait, the most allowed", code="queue_full", retry_after=60
            )
        stages = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        batch = {
            "id": f"batch_{secrets.token_hex(12)}",
            "object": "batch",
            "endpoint": endpoint,
            "model": self._context.model.name,
            "errors": None,
            "input_file_id": input_file_id,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(time.time()),
            "expires_at": None,
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
        found = []
        for path in self._root.glob("batch_*.json"):
            try:
                found.append(json.loads(path.read_bytes()))
            except ValueError:  # what a power cut has left
                logger.warning("%s is not a batch any more", path.name)
        return sorted(found, key=lambda b: (b["created_at"], b["id"]), reverse=True)

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """A batch that has not begun is cancelled at once, one that runs soon."""
        with self._lock:
            batch = self.get(batch_id)
            if batch["status"] not in _UNFINISHED:
                raise RequestError(
                    f"the batch is {batch['status']}: there is nothing to cancel", param="batch_id"
                )
            now = int(time.time())
            batch |= {"status": "cancelling", "cancelling_at": batch["cancelling_at"] or now}
            if batch_id == self._running:
                self._cancelled.set()
            elif batch["in_progress_at"] is None:
                batch |= {"status": "cancelled", "cancelled_at": now}
            return self._write(batch)

    # The thread

    def _run(self) -> None:
        while (batch_id := self._queue.get()) is not None and not self._stopping.is_set():
            try:
                self._run_one(batch_id)
            except (EngineFailure, concurrent.futures.CancelledError):
                logger.error("batch %s goes on after the next start: the engine has stopped", batch_id)
                return
            except Exception:  # such as a full disk: the next batch may do
                logger.exception("batch %s was given up until the next start", batch_id)

    def _run_one(self, batch_id: str) -> None:
        with self._lock:
            batch = self.get(batch_id)
            if batch["status"] not in _UNFINISHED:  # cancelled while it waited
                return
            self._running = batch_id
            self._cancelled.clear()
            if batch["status"] == "cancelling":
                self._cancelled.set()
        error = None
        try:
            if not self._cancelled.is_set() and self._answer(batch) and not self._cancelled.is_set():
                return  # the server stops
        except (EngineFailure, concurrent.futures.CancelledError):
            raise
        except (RequestError, HTTPFailure) as refusal:
            error = str(refusal)
        except Exception:
            logger.exception("batch %s failed", batch_id)
            error = "internal error: the server's log says more"
        self._finish(batch_id, error)

    def _answer(self, batch: dict[str, Any]) -> bool:
        """Runs the lines that have no result yet. Whether it was stopped before the last."""
        if batch["model"] != self._context.model.name:
            raise RequestError(f"the model {batch['model']!r} is not served any more")
        source = self._files.content(batch["input_file_id"])
        with source.open("rb") as stream:
            counts = {"total": sum(1 for _ in read_lines(stream)), "completed": 0, "failed": 0}
        self._update(batch["id"], "in_progress", request_counts=counts)
        last_written = time.monotonic()

        def on_progress(progress: BatchProgress) -> None:
            nonlocal last_written
            if time.monotonic() - last_written > 1:
                last_written = time.monotonic()
                answered = {"completed": progress.done - progress.failed, "failed": progress.failed}
                self._update(batch["id"], None, request_counts=counts | answered)

        def should_stop() -> bool:
            return self._stopping.is_set() or self._cancelled.is_set()

        model = ServedBatchModel(self._context, self._loop, should_stop)
        output = OrderedOutput(self._results(batch["id"]))
        try:
            with source.open("rb") as stream:
                progress = run_batch(
                    model,
                    read_lines(stream),
                    output,
                    max_in_flight=_MAX_IN_FLIGHT,
                    endpoint=batch["endpoint"],
                    prepare_request=model.prepare,
                    on_progress=on_progress,
                    should_stop=should_stop,
                )
        except Stopped:
            return True
        finally:
            output.close()
        return progress.interrupted

    def _finish(self, batch_id: str, error: str | None) -> None:
        """Sorts results into OpenAI's two files, answers and errors, and says that the batch is over.

        Args:
          error: why the batch failed, or None.
        """
        self._update(batch_id, "finalizing")
        path = self._results(batch_id)
        counts = {"completed": 0, "failed": 0}
        ids: dict[str, str | None] = {}
        with self._files.new() as answers, self._files.new() as errors:
            with answers.content.open("wb") as good, errors.content.open("wb") as bad:
                for record in read_results(path):
                    failed = results.is_failure(record)
                    counts["failed" if failed else "completed"] += 1
                    (bad if failed else good).write(record)
            for name, new, count in (
                ("output", answers, counts["completed"]),
                ("error", errors, counts["failed"]),
            ):
                made = new.finish(f"{batch_id}_{name}.jsonl", "batch_output")["id"] if count else None
                ids[f"{name}_file_id"] = made
        with self._lock:
            self._running = None
            batch = self.get(batch_id)
            status = "cancelled" if batch["status"] == "cancelling" else "failed" if error else "completed"
            said = {"object": "list", "data": [{"code": "batch_failed", "message": error}]}
            self._write(
                {
                    **batch,
                    **ids,
                    "status": status,
                    f"{status}_at": int(time.time()),
                    "request_counts": batch["request_counts"] | counts,
                    "errors": said if error else None,
                }
            )
        for file in (path, journal_of(path)):
            file.unlink(missing_ok=True)

    def _results(self, batch_id: str) -> Path:
        return self._root / f"{batch_id}.results.jsonl"

    def _update(self, batch_id: str, status: str | None, **changes: Any) -> None:
        with self._lock:
            batch = {**self.get(batch_id), **changes}
            if status is not None and batch["status"] != "cancelling":
                batch |= {"status": status, f"{status}_at": int(time.time())}
            self._write(batch)

    def _write(self, batch: dict[str, Any]) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile("w", prefix="new-", dir=self._root, delete=False) as file:
            file.write(json.dumps(batch))
        os.replace(file.name, self._root / f"{batch['id']}.json")
        return batch


# Routes


def batches_of(request: web.Request) -> BatchStore:
    store = request.app[CONTEXT].batches
    if store is None:
        raise HTTPFailure(
            400, "this server keeps no batches: start it with --data-dir DIR", code="files_not_enabled"
        )
    return store


async def create(request: web.Request) -> web.Response:
    body = await read_json(request)
    store = batches_of(request)
    refuse_unsupported(read_object(body), BATCHES)
    asked = read(body, BatchBody)
    return web.json_response(store.create(asked.input_file_id, asked.endpoint, asked.metadata or {}))


async def retrieve(request: web.Request) -> web.Response:
    return web.json_response(batches_of(request).get(request.match_info["batch_id"]))


async def listing(request: web.Request) -> web.Response:
    return web.json_response(page(await asyncio.to_thread(batches_of(request).all), request))


async def cancel(request: web.Request) -> web.Response:
    return web.json_response(batches_of(request).cancel(request.match_info["batch_id"]))
