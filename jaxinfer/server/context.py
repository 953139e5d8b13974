"""What every handler of one server shares."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web

from jaxinfer.config.server import ServerConfig
from jaxinfer.engine.constraint import GrammarCompiler
from jaxinfer.engine.service import EngineService
from jaxinfer.errors import OverloadError, RequestError
from jaxinfer.media.fetch import FetchPolicy
from jaxinfer.media.images import ImageLimits
from jaxinfer.media.processor import ImageProcessor
from jaxinfer.protocol.images import ImageOptions, fetch_all, image_urls
from jaxinfer.protocol.prompt import PreparedRequest, prepare
from jaxinfer.protocol.request import GenerationRequest
from jaxinfer.server.metrics import Metrics
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxinfer.server.batches import BatchStore
    from jaxinfer.server.files import FileStore


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """The model as requests meet it: jaxinfer.LLM without its engine.

    Attributes:
      defaults: sampling settings for what a request leaves open.
      hidden_states: final ones of token ids, float32 [T, D]; slow, for embeddings.
      image_processor: of models that take images.
      grammars: the engine's compiler, so that grammars are compiled off its thread.
      facts: shown by /v1/models: architecture, parameters, dtype and the like.
    """

    name: str
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    max_model_len: int
    vocab_size: int
    defaults: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    grammars: GrammarCompiler | None = None
    image_processor: ImageProcessor | None = None
    hidden_states: Callable[[list[int]], np.ndarray] | None = None


class ServerContext:
    """One server's model, engine, settings and state.

    Attributes:
      files, batches: what is kept in config.data_dir, None without one; set by `lifecycle.running`.
      draining: set on SIGTERM; new requests are refused, those in progress go on.
      started: when the server began, seconds since 1970.
    """

    def __init__(self, model: ServedModel, service: EngineService, config: ServerConfig):
        self.model = model
        self.service = service
        self.config = config
        self.metrics = Metrics(service, model)
        self.draining = False
        self._images = ImageOptions(
            model.image_processor,
            ImageLimits(max_bytes=config.max_image_bytes, max_pixels=config.max_image_pixels),
            FetchPolicy(
                allow_http=config.allow_image_urls, hosts=config.image_hosts, max_bytes=config.max_image_bytes
            ),
            config.max_images,
        )
        self.files: FileStore | None = None
        self.batches: BatchStore | None = None
        self.started = int(time.time())
        # Rendering and tokenising hold the GIL for milliseconds; a few threads keep one slow prompt from blocking the rest.
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="prepare")
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="grammar")  # they take up to a second each
        # One text at a time, each takes memory of its own; also when its client has left before the end.
        self._embedder = ThreadPoolExecutor(1, thread_name_prefix="embed")

    async def prepare(self, request: GenerationRequest) -> PreparedRequest:
        """`jaxinfer.protocol.prompt.prepare` off the event loop. RequestError when it takes too long."""
        model = self.model
        files = None
        if request.chat is not None:
            urls = image_urls(request.chat.messages, self._images)
            files = await fetch_all(urls, self._images.policy)

        def work() -> PreparedRequest:
            return prepare(
                request,
                model.tokenizer,
                model.chat_template,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                safe=self.config.safe_prompts,
                tool_parser=self.config.tool_call_parser,
                reasoning_parser=self.config.reasoning_parser,
                images=self._images,
                files=files,
            )

        prepared = await self.in_worker(work)
        constraint, grammars = prepared.params.constraint, model.grammars
        if constraint is not None and grammars is not None:  # kept for the engine's thread
            await self._in_pool(
                self._compilers, lambda: grammars.compile(constraint), "compiling the grammar"
            )
        return prepared

    async def in_worker[T](
        self, work: Callable[[], T], what: str = "rendering and tokenising the prompt"
    ) -> T:
        """What `work` returns, called off the event loop.

        Raises:
          RequestError: it takes too long.
          OverloadError: it could not even be begun in that time.
        """
        return await self._in_pool(self._workers, work, what)

    async def embed[T](self, work: Callable[[], T]) -> T:
        """What `work` returns, called off the event loop after all such work that came before."""
        return await asyncio.wrap_future(self._embedder.submit(work))

    async def _in_pool[T](self, pool: ThreadPoolExecutor, work: Callable[[], T], what: str) -> T:
        limit = self.config.template_timeout_s
        job = pool.submit(work)
        try:
            async with asyncio.timeout(limit):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            if job.cancelled():
                raise OverloadError("too many requests are being prepared: try again later") from None
            raise RequestError(f"{what} took more than {limit:g} s: make it shorter") from None

    def close(self) -> None:
        for pool in (self._workers, self._compilers, self._embedder):
            pool.shutdown(wait=False, cancel_futures=True)


CONTEXT = web.AppKey("context", ServerContext)
