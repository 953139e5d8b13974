"""/v1/files: OpenAI's file store, in a directory. A file is a folder with its content and a JSON object that describes it."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import BodyPartReader, web

from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.server.context import CONTEXT
from jaxinfer.server.errors import HTTPFailure

_ID = re.compile(r"file-[0-9a-f]{24}")
_PURPOSES = ("batch", "batch_output", "user_data")
_CHUNK = 2**18


class FileStore:
    """Files under a directory of the server's own. Safe to use from several threads: each file is made complete, then shown."""

    def __init__(self, root: Path):
        self._root = root / "files"
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"data_dir {root} cannot be used: {error.strerror}") from None
        for leftover in self._root.glob("new-*"):  # of an upload that was cut off
            shutil.rmtree(leftover, ignore_errors=True)

    def new(self) -> NewFile:
        return NewFile(self._root)

    def describe(self, file_id: str) -> dict[str, Any]:
        """The file object. HTTPFailure 404 when there is none."""
        return json.loads((self._folder(file_id) / "file.json").read_bytes())

    def content(self, file_id: str) -> Path:
        return self._folder(file_id) / "content"

    def all(self) -> Iterator[dict[str, Any]]:
        """Newest first."""
        found = []
        for path in self._root.glob("file-*/file.json"):
            try:
                found.append(json.loads(path.read_bytes()))
            except (OSError, ValueError):  # deleted meanwhile
                continue
        yield from sorted(found, key=lambda file: (file["created_at"], file["id"]), reverse=True)

    def delete(self, file_id: str) -> None:
        folder = self._folder(file_id)
        gone = self._root / f"new-{secrets.token_hex(12)}"
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _folder(self, file_id: str) -> Path:
        folder = self._root / file_id
        if not _ID.fullmatch(file_id) or not folder.is_dir():
            raise HTTPFailure(404, f"no file {file_id[:80]!r}", param="file_id", code="file_not_found")
        return folder


class NewFile:
    """A file being written: `content` is where; `finish` shows it; leaving the block without it drops it."""

    def __init__(self, root: Path):
        self._root = root
        self._folder = Path(tempfile.mkdtemp(prefix="new-", dir=root))
        self.content = self._folder / "content"

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def finish(self, filename: str, purpose: str) -> dict[str, Any]:
        file_id = f"file-{secrets.token_hex(12)}"
        description = {
            "id": file_id,
            "object": "file",
            "bytes": self.content.stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        (self._folder / "file.json").write_text(json.dumps(description))
        os.rename(self._folder, self._root / file_id)
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
    purpose, filename = None, None
    with store.new() as new:
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader):
                raise RequestError("parts must not be multipart themselves", param="file")
            if part.name == "purpose":
                purpose = (await part.read(decode=True))[:64].decode("utf-8", "replace")
            elif part.name == "file":
                filename = Path(part.filename or "file").name[:255]
                with new.content.open("wb") as target:
                    size = 0
                    while piece := await part.read_chunk(_CHUNK):
                        size += len(piece)
                        if size > limit:
                            raise HTTPFailure(
                                413, f"the file is larger than the {limit} bytes allowed", param="file"
                            )
                        target.write(piece)
        if filename is None:
            raise RequestError("the part file is missing", param="file")
        if purpose not in _PURPOSES:
            raise RequestError(f"purpose must be one of {', '.join(_PURPOSES)}", param="purpose")
        return web.json_response(new.finish(filename, purpose))


async def listing(request: web.Request) -> web.Response:
    wanted = request.query.get("purpose")
    files = [f for f in files_of(request).all() if wanted in (None, f["purpose"])]
    return web.json_response(page(files, request))


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
    try:
        limit = min(max(int(request.query.get("limit", "100")), 1), 10_000)
    except ValueError:
        raise RequestError("limit must be an integer", param="limit") from None
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
