"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxinfer.errors import ConfigError
from jaxinfer.protocol.strict_json import MAX_DEPTH, MAX_VALUES
from jaxinfer.text.parsers import REASONING_PARSERS, TOOL_PARSERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Limits, keys and times. Every limit has an answer of its own when it is met (docs/server.md)."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    served_model_name: str | None = None  # in responses and /v1/models; None: what the model was opened as
    api_keys_file: Path | None = None  # one key a line; None: no key is asked for
    admin_keys_file: Path | None = None  # for /admin routes; None: they are off
    tool_call_parser: str | None = "auto"  # a name in jaxinfer.text.parsers; auto: by the chat template
    reasoning_parser: str | None = "auto"
    cors_origins: tuple[str, ...] = ()  # that browsers may call from; "*" is any
    data_dir: Path | None = None  # keeps files and batches; None: those routes are off
    max_file_bytes: int = 2**30  # of an uploaded file
    max_stored_bytes: int = 2**35  # of all files in data_dir; then nothing is taken until some are deleted
    max_body_bytes: int = 32 * 2**20
    max_header_bytes: int = 64 * 2**10
    max_json_depth: int = MAX_DEPTH
    max_json_values: int = MAX_VALUES  # of a body
    max_queued_requests: int = 1024  # waiting for a slot in the engine
    max_queued_prefill_tokens: int = 2_000_000  # prompt tokens of requests without a first token
    max_images: int = 32  # of one request
    max_image_bytes: int = 20 * 2**20  # of one image's file
    max_image_pixels: int = 64 * 2**20  # of one image, decoded
    allow_image_urls: bool = False  # fetch http(s) images from public hosts; else data: URLs alone
    image_hosts: tuple[
        str, ...
    ] = ()  # such hosts alone (.example.com: and those below it); empty: all public ones
    max_n: int = 128  # completions of one request, over all its prompts
    request_timeout_s: float = 600.0  # from arrival to the end of the answer
    template_timeout_s: float = 10.0  # rendering and tokenising a prompt
    keep_alive_s: float = 15.0  # a comment is sent on a stream that has been silent so long
    max_unread_bytes: int = 2**20  # of a stream whose client does not read; then it is dropped
    drain_timeout_s: float = 30.0  # for requests in progress after SIGTERM
    safe_prompts: bool = False  # text of users and tools never becomes a control token
    log_requests: bool = True  # one JSON line each on stderr
    otlp_traces_endpoint: str | None = None  # that spans are sent to, http://HOST:4318/v1/traces

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name, known in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            chosen = getattr(self, name)
            if chosen is not None and chosen != "auto" and chosen not in known:
                raise ConfigError(f"{name} {chosen!r} is unknown; known: auto, none, {', '.join(known)}")
        for name in (
            *("max_body_bytes", "max_header_bytes", "max_json_depth", "max_json_values"),
            *("max_queued_requests", "max_queued_prefill_tokens", "max_file_bytes", "max_stored_bytes"),
            *("max_n", "max_unread_bytes", "max_images", "max_image_bytes", "max_image_pixels"),
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("request_timeout_s", "template_timeout_s", "keep_alive_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0 seconds, got {getattr(self, name)}")
        if self.drain_timeout_s < 0:
            raise ConfigError(f"drain_timeout_s must be at least 0, got {self.drain_timeout_s}")
