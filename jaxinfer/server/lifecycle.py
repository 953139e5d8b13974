"""From a socket that listens to the last answer: start, run until a signal, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from jaxinfer.errors import ConfigError
from jaxinfer.server.app import make_app
from jaxinfer.server.batches import BatchStore
from jaxinfer.server.context import ServerContext
from jaxinfer.server.files import FileStore

logger = logging.getLogger(__name__)

_MAX_FILES = 65_536


@contextlib.asynccontextmanager
async def running(context: ServerContext) -> AsyncIterator[str]:
    """Serves while the block runs; gives the base URL. Leaving it drains, then stops the engine's thread.

    Raises:
      ConfigError: the address cannot be bound.
    """
    config = context.config
    logging.getLogger("aiohttp.server").addFilter(_worth_a_traceback)
    runner = web.AppRunner(
        make_app(context),
        handler_cancellation=True,  # a client that leaves ends its handler, and so its request
        access_log=None,
        shutdown_timeout=1.0,  # by then everything has been drained or given up
        max_field_size=config.max_header_bytes,
        max_headers=config.max_header_bytes,
    )
    if config.data_dir is not None:
        context.files = FileStore(config.data_dir, config.max_stored_bytes)
        context.batches = BatchStore(context, context.files, config.data_dir)
    context.service.start()
    if context.batches is not None:
        context.batches.start()
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from None
        host, port = runner.addresses[0][:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
        context.draining = True
        if context.batches is not None:
            await context.batches.stop()
        await drain(context)
    finally:
        context.draining = True
        if context.batches is not None:
            await context.batches.stop()
        await context.service.stop()
        await runner.cleanup()
        if context.files is not None:
            context.files.close()
        context.close()


def _worth_a_traceback(record: logging.LogRecord) -> bool:
    """What a client got wrong in HTTP itself is not; aiohttp has answered it with 400."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


async def drain(context: ServerContext) -> None:
    """Takes no new requests and waits for those in progress, as long as the settings allow."""
    context.draining = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(context.config.drain_timeout_s):
            while context.service.num_active and context.service.healthy:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0)  # let handlers write their last events
    if context.service.num_active:
        logger.warning("%d requests were cut off by the end of the drain", context.service.num_active)


def raise_file_limit() -> None:
    """Lets this process have as many open files as it may: a connection is one, and shells often start with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def until_signal() -> None:
    """Returns on SIGTERM or SIGINT; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def first() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, first)
    await stop.wait()
