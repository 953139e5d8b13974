"""Who gets in: 503 when nothing here can serve, 429 with Retry-After when it can but is busy."""

from __future__ import annotations

from jaxinfer.server.context import ServerContext
from jaxinfer.server.errors import HTTPFailure

_DRAIN_RETRY_S = 5


def check_alive(context: ServerContext) -> None:
    """Raises HTTPFailure 503 when the engine is dead or the server is on its way out."""
    if not context.service.healthy:
        raise HTTPFailure(503, "the engine has failed; the server must be restarted", code="engine_dead")
    if context.draining:
        raise HTTPFailure(
            503, "the server is shutting down", code="shutting_down", retry_after=_DRAIN_RETRY_S
        )


def check_room(context: ServerContext, prompt_tokens: int) -> None:
    """Raises HTTPFailure 429 when too much is queued already. A request that finds nothing before it is always let in."""
    service, config = context.service, context.config
    if service.num_queued >= config.max_queued_requests:
        context.metrics.rejected("queued_requests")
        raise HTTPFailure(
            429,
            f"{service.num_queued} requests wait for their first token, the most allowed: try again later",
            code="queue_full",
            retry_after=1,
        )
    queued = service.queued_prefill_tokens
    if queued and queued + prompt_tokens > config.max_queued_prefill_tokens:
        context.metrics.rejected("queued_prefill_tokens")
        raise HTTPFailure(
            429,
            f"{queued} prompt tokens wait to be computed; with this prompt's {prompt_tokens} they would be more than the "
            f"{config.max_queued_prefill_tokens} allowed: try again later",
            code="queue_full",
            retry_after=1,
        )
