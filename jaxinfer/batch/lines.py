"""Input lines of a batch: read within bounds, numbered, hashed, and parsed into requests or errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_args, runtime_checkable

from jaxinfer.errors import RequestError
from jaxinfer.protocol.convert import read, wrong
from jaxinfer.protocol.parse import parse_chat_request, parse_completion_request, parse_plain_request
from jaxinfer.protocol.request import GenerationRequest
from jaxinfer.protocol.strict_json import check_shape, describe, parse_json
from jaxinfer.protocol.types import BatchEndpoint, BatchLineBody, Labelled

MAX_LINE_BYTES = 32 << 20  # as large as a request body may be in vLLM's server
_PARSERS = {"/v1/chat/completions": parse_chat_request, "/v1/completions": parse_completion_request}
ENDPOINTS: tuple[str, ...] = get_args(BatchEndpoint)
_BOM = b"\xef\xbb\xbf"


@runtime_checkable
class ByteSource(Protocol):
    """An open binary file."""

    def readline(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line that is not blank.

    Attributes:
      number: in the file, from 1.
      data: its bytes without the line end; cut after MAX_LINE_BYTES.
      id: the id of its result; the same line at the same place under the same settings has the same id.
      too_long: `data` was cut.
    """

    number: int
    data: bytes
    id: str
    too_long: bool = False


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A parsed line: `request` or `error`. `in_body` tells an error in the body from one in the line around it."""

    id: str
    number: int
    openai: bool
    custom_id: str | None = None
    request: GenerationRequest | None = None
    error: RequestError | None = None
    in_body: bool = False


def read_lines(stream: ByteSource, settings: str = "") -> Iterator[InputLine]:
    """Yields the lines that are not blank, holding one at a time.

    Args:
      settings: whatever else decides the results (model, defaults): goes into the ids, so that results made under
        other settings are not taken for these.
    """
    number = 0
    while piece := stream.readline(MAX_LINE_BYTES):
        number += 1
        data = piece.removeprefix(_BOM if number == 1 else b"").rstrip(b"\r\n")
        digest = hashlib.sha256(settings.encode() + b"\0" + data)
        too_long = False
        while not piece.endswith(b"\n") and (piece := stream.readline(MAX_LINE_BYTES)):
            too_long = True
            digest.update(piece)
        if data.strip():
            yield InputLine(number, data, f"batch_req_{number}_{digest.hexdigest()[:16]}", too_long)


class LineParser:
    """Parses lines in order, and remembers the custom ids it has seen (a few dozen bytes each).

    Args:
      openai_defaults, plain_defaults: request fields for lines of each form that do not set them.
      endpoint: the one url that lines may name; None for any of ENDPOINTS.
    """

    def __init__(
        self,
        openai_defaults: Mapping[str, Any],
        plain_defaults: Mapping[str, Any],
        endpoint: str | None = None,
    ):
        self._endpoints = ENDPOINTS if endpoint is None else (endpoint,)
        self._openai_defaults = openai_defaults
        self._plain_defaults = plain_defaults
        self._seen: set[int] = set()

    def parse(self, line: InputLine) -> BatchLine:
        """Never raises for what is in the line: that becomes the `error`."""
        if line.too_long:
            error = RequestError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB", code="line_too_long")
            return BatchLine(line.id, line.number, True, error=error)
        try:
            check_shape(line.data)
            members = parse_json(line.data)
            if not isinstance(members, dict):
                raise RequestError(f"the line must be a JSON object, got {describe(members)}")
        except RequestError as error:
            custom_id = _salvage_custom_id(line.data)
            if custom_id is not None:
                self._first_time(custom_id)
            return BatchLine(line.id, line.number, True, custom_id, error=error)

        openai = not members.keys().isdisjoint(("method", "url", "body"))
        custom_id = None
        in_body = False
        try:
            custom_id = read(members, Labelled).custom_id
            if custom_id is not None and not self._first_time(custom_id):
                raise wrong("custom_id", f"{describe(custom_id)} was used by an earlier line")
            if openai:
                if not custom_id:
                    raise wrong("custom_id", "is missing")
                outer = read(members, BatchLineBody)
                if outer.url not in self._endpoints:
                    wanted = " or ".join(self._endpoints)
                    raise wrong("url", f"must be {wanted}, got {describe(outer.url)}", code="invalid_url")
                if outer.body is None:
                    raise wrong("body", "is missing")
                in_body = True
                request = _PARSERS[outer.url](outer.body, self._openai_defaults)
            else:
                body = {name: value for name, value in members.items() if name != "custom_id"}
                request = parse_plain_request(body, self._plain_defaults)
            if request.stream:
                raise wrong("stream", "is not possible in a batch: remove it")
        except RequestError as error:
            return BatchLine(line.id, line.number, openai, custom_id, error=error, in_body=in_body)
        return BatchLine(line.id, line.number, openai, custom_id, request)

    def _first_time(self, custom_id: str) -> bool:
        key = int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=12).digest())
        known = key in self._seen
        self._seen.add(key)
        return not known


def _salvage_custom_id(data: bytes) -> str | None:
    """The custom_id of a line that is JSON but for our stricter rules (NaN, a repeated key)."""
    try:
        custom_id = json.loads(data)["custom_id"]
        custom_id.encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return custom_id
