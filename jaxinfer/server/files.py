"""/v1/files: OpenAI's file store, in a directory. A file is a folder with its content and a JSON object that describes it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import BadHttpMessage

from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.server.context import CONTEXT
from jaxinfer.server.errors import HTTPFailure

_ID = re.compile(r"file-[0-9a-f]{24}")
PURPOSES = ("batch", "batch_output", "user_data")
_INTEGER = re.compile(r"-?[0-9]+")
_MAX_DIGITS = 20  # of a limit that are read: a page is never so long
_CHUNK = 2**18
_MAX_PARTS = 16  # of an upload; OpenAI's clients send two to four


class FileStore:
    """Files under a directory of the server's own. Safe to use from several threads: each file is made complete, then shown.

    Args:
      max_bytes: of all files together; results of batches are kept even so, but then nothing new is taken.

    Raises:
      ConfigError: the directory cannot be used, or another server uses it.
    """

    def __init__(self, root: Path, max_bytes: int):
        self._root = root / "files"
        self._max_bytes = max_bytes
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._guard = (root / "lock").open("wb")
        except OSError as error:
            raise ConfigError(f"data_dir {root} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._guard.close()
            raise ConfigError(f"data_dir {root} is used by another server: choose another") from None
        except OSError:  # a file system without locks
            pass
        self._lock = threading.Lock()
        self._used = sum(path.stat().st_size for path in self._root.glob("file-*/content"))
        for leftover in self._root.glob("new-*"):  # of an upload that was cut off
            shutil.rmtree(leftover, ignore_errors=True)

    def close(self) -> None:
        """Lets another server have the directory."""
        self._guard.close()

    def take(self, size: int) -> None:
        """Sets bytes aside for a new file. HTTPFailure 413 when there are not so many left."""
        with self._lock:
            if self._used + size > self._max_bytes:
                raise HTTPFailure(
                    413,
                    f"all files together may hold {self._max_bytes} bytes: delete some first",
                    param="file",
                    code="storage_full",
                )
            self._used += size

    def give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size

    def new(self) -> NewFile:
        return NewFile(self, self._root)

    def describe(self, file_id: str) -> dict[str, Any]:
        """The file object. HTTPFailure 404 when there is none."""
        return json.loads((self._folder(file_id) / "file.json").read_bytes())

    def content(self, file_id: str) -> Path:
        return self._folder(file_id) / "content"

    def all(self) -> list[dict[str, Any]]:
        """Newest first."""
        found = []
        for path in self._root.glob("file-*/file.json"):
            try:
                found.append(json.loads(path.read_bytes()))
            except (OSError, ValueError):  # deleted meanwhile
                continue
        return sorted(found, key=lambda file: (file["created_at"], file["id"]), reverse=True)

    def delete(self, file_id: str) -> None:
        folder = self._folder(file_id)
        gone = self._root / f"new-{secrets.token_hex(12)}"
        folder.rename(gone)
        self.give_back((gone / "content").stat().st_size)
        shutil.rmtree(gone, ignore_errors=True)

    def _folder(self, file_id: str) -> Path:
        folder = self._root / file_id
        if not _ID.fullmatch(file_id) or not folder.is_dir():
            raise HTTPFailure(404, f"no file {file_id[:80]!r}", param="file_id", code="file_not_found")
        return folder


class NewFile:
    """A file being written: `content` is where, after `take`; `finish` shows it; leaving the block without it drops it."""

    def __init__(self, store: FileStore, root: Path):
        self._store = store
        self._root = root
        self._taken = 0
        self._folder = Path(tempfile.mkdtemp(prefix="new-", dir=root))
        self.content = self._folder / "content"

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.give_back(self._taken)
        shutil.rmtree(self._folder, ignore_errors=True)

    def take(self, size: int) -> None:
        """As FileStore's, to be given back when the file is dropped."""
        self._store.take(size)
        self._taken += size

    def finish(self, filename: str, purpose: str) -> dict[str, Any]:
        file_id = f"file-{secrets.token_hex(12)}"
        size = self.content.stat().st_size
        description = {
            "id": file_id,
            "object": "file",
            "bytes": size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        (self._folder / "file.json").write_text(json.dumps(description))
        os.rename(self._folder, self._root / file_id)
        self._store.give_back(self._taken - size)
        self._taken = 0
        return description


def files_of(request: web.Request) -> FileStore:
    store = request.app[CONTEXT].files
    if store is None:
        raise HTTPFailure(
            400, "this server keeps no files: start it with --data-dir DIR", code="files_not_enabled"
        )
    return store


async def upload(request: web.Request) -> web.Response:
    """multipart/form-data with `purpose` and `file`."""
    store = files_of(request)
    limit = request.app[CONTEXT].config.max_file_bytes
    if request.content_type != "multipart/form-data":
        raise HTTPFailure(415, "a file is uploaded as multipart/form-data, with purpose and file")
    with store.new() as new:
        try:
            purpose, filename = await _receive(request, new, limit)
        except (ValueError, RuntimeError, AssertionError, BadHttpMessage):  # what aiohttp's reader raises
            raise RequestError("the body is not well-formed multipart/form-data", param="file") from None
        if filename is None:
            raise RequestError("the part file is missing", param="file")
        if purpose not in PURPOSES:
            raise RequestError(f"purpose must be one of {', '.join(PURPOSES)}", param="purpose")
        return web.json_response(new.finish(filename, purpose))


async def _receive(request: web.Request, new: NewFile, limit: int) -> tuple[str | None, str | None]:
    """Reads the parts; returns purpose and file name, None for what is not there."""
    purpose, filename, count = None, None, 0
    async for part in await request.multipart():
        count += 1
        if count > _MAX_PARTS:
            raise RequestError(f"there are more than {_MAX_PARTS} parts", param="file")
        if not isinstance(part, BodyPartReader):
            raise RequestError("parts must not be multipart themselves", param="file")
        if part.name == "purpose":
            purpose = (await part.read())[:64].decode("utf-8", "replace")
        elif part.name == "file":
            if filename is not None:
                raise RequestError("there is more than one part file", param="file")
            filename = Path(part.filename or "file").name[:255]
            size = 0
            with new.content.open("wb") as target:
                while piece := await part.read_chunk(_CHUNK):
                    size += len(piece)
                    if size > limit:
                        raise HTTPFailure(
                            413, f"the file is larger than the {limit} bytes allowed", param="file"
                        )
                    new.take(len(piece))
                    target.write(piece)
        elif (part.name or "").startswith("expires_after"):
            raise RequestError(
                "expires_after is not supported: files stay until they are deleted", param="expires_after"
            )
    return purpose, filename


async def listing(request: web.Request) -> web.Response:
    wanted = request.query.get("purpose")
    found = await asyncio.to_thread(files_of(request).all)
    return web.json_response(page([f for f in found if wanted in (None, f["purpose"])], request))


async def retrieve(request: web.Request) -> web.Response:
    return web.json_response(files_of(request).describe(request.match_info["file_id"]))


async def content(request: web.Request) -> web.StreamResponse:
    path = files_of(request).content(request.match_info["file_id"])
    return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})


async def delete(request: web.Request) -> web.Response:
    file_id = request.match_info["file_id"]
    files_of(request).delete(file_id)
    return web.json_response({"id": file_id, "object": "file", "deleted": True})


def page(objects: list[dict[str, Any]], request: web.Request) -> dict[str, Any]:
    """OpenAI's list object: `limit` of them after the one named by `after`."""
    asked = request.query.get("limit", "100")
    if not _INTEGER.fullmatch(asked):
        raise RequestError("limit must be an integer", param="limit")
    limit = min(max(int(asked[:_MAX_DIGITS]), 1), 10_000)
    ids = [o["id"] for o in objects]
    after = request.query.get("after")
    if after is not None:
        if after not in ids:
            raise RequestError(f"after names {after[:80]!r}, which is not in the list", param="after")
        objects = objects[ids.index(after) + 1 :]
    shown = objects[:limit]
    return {
        "object": "list",
        "data": shown,
        "has_more": len(objects) > limit,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }
