"""Server-sent events to one client: written straight to its transport, with a bound on what it leaves unread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from aiohttp import HttpVersion11, web

from jaxinfer.protocol.stream import KEEP_ALIVE
from jaxinfer.server.call import call_of

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """An open response. `write` never waits: events of a client that does not read pile up to a bound, then it is dropped.

    Attributes:
      dropped: the client read too slowly and was cut off.
    """

    def __init__(
        self,
        request: web.Request,
        *,
        keep_alive_s: float,
        max_unread_bytes: int,
        on_drop: Callable[[], None],
    ):
        """on_drop: called once, from within `write`, when the client is dropped."""
        self._request = request
        self._keep_alive = keep_alive_s
        self._max_unread = max_unread_bytes
        self._on_drop = on_drop
        self._response: web.StreamResponse | None = None
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0
        self._loop = asyncio.get_running_loop()
        self.dropped = False

    async def open(self, headers: Mapping[str, str], opening: bytes) -> web.StreamResponse:
        """Sends the head and the first events; what was written before goes right after them."""
        response = web.StreamResponse(headers={**headers, **_HEADERS})
        if self._request.version >= HttpVersion11:
            response.enable_chunked_encoding()
        else:
            response.force_close()  # whose end is the end of the stream
        call_of(self._request).head_sent = True  # no error response can follow
        await response.prepare(self._request)
        self._response = response
        transport = self._request.transport
        assert transport is None or isinstance(transport, asyncio.Transport)
        self._transport = transport
        early, self._early = self._early, []
        self.write(opening + b"".join(early))
        self._arm(self._keep_alive)
        return response

    def write(self, events: bytes) -> None:
        if not events or self.dropped:
            return
        if self._response is None:
            self._early.append(events)
            return
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # gone; the handler is cancelled
        # The framing that aiohttp's writer would add, without a coroutine for each event.
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._response.chunked else events)
        self._last = self._loop.time()
        if transport.get_write_buffer_size() > self._max_unread:
            self.dropped = True
            transport.abort()
            self._on_drop()

    async def close(self) -> None:
        """Ends the response; the connection can serve another request."""
        self.cancel()
        if self._response is not None and not self.dropped:
            with contextlib.suppress(ConnectionResetError):  # it has just left
                await self._response.write_eof()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._keep)

    def _keep(self) -> None:
        silent = self._loop.time() - self._last
        if silent >= self._keep_alive:
            self.write(KEEP_ALIVE)
            silent = 0.0
        if not self.dropped and self._transport is not None and not self._transport.is_closing():
            self._arm(self._keep_alive - silent)
