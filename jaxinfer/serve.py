"""`python -m jaxinfer.serve --model M`: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli import ArgumentParser, guarded
from jaxinfer.config.server import ServerConfig
from jaxinfer.engine_flags import add_engine_flags, load_model

if TYPE_CHECKING:
    from jaxinfer.api import LLM
    from jaxinfer.server.context import ServedModel

_HELP = {
    "host": "address to listen on; 0.0.0.0 is every one of this machine's",
    "port": "0 takes any free port",
    "served_model_name": "what clients call the model (default: what --model says)",
    "api_keys_file": "file with one API key a line; without it no key is asked for",
    "admin_keys_file": "file with one key a line for /admin routes; without it they are off",
    "tool_call_parser": "how tool calls are read (default: by the chat template), or none",
    "reasoning_parser": "how reasoning is told from the answer (default: by the chat template), or none",
    "cors_origins": "an origin that browsers may call from, or *; may be repeated (default: none)",
    "data_dir": "directory for /v1/files and /v1/batches; without it they are off",
    "max_file_bytes": "largest uploaded file",
    "max_stored_bytes": "all files in --data-dir together; no more are taken then until some are deleted",
    "max_body_bytes": "largest request body",
    "max_header_bytes": "largest header, and all headers together",
    "max_json_depth": "how deeply a body may nest",
    "max_json_values": "values that a body may hold, such as token ids",
    "max_queued_requests": "requests that may wait for their first token; more are answered 429",
    "max_queued_prefill_tokens": "prompt tokens that may wait to be computed; more are answered 429",
    "max_images": "images of one request",
    "max_image_bytes": "largest file of one image",
    "max_image_pixels": "most pixels of one image, decoded",
    "allow_image_urls": "fetch images from http(s) URLs of public hosts (default: data: URLs alone)",
    "image_hosts": "fetch images from this host alone, or with a leading dot from those below it; may be repeated",
    "max_n": "completions of one request, over all its prompts",
    "request_timeout_s": "from a request's arrival to the end of its answer",
    "template_timeout_s": "for rendering and tokenising one prompt",
    "keep_alive_s": "a stream silent so long gets a comment line",
    "max_unread_bytes": "a streaming client that leaves more unread is dropped",
    "drain_timeout_s": "how long SIGTERM waits for requests in progress",
    "safe_prompts": "text of users, tools and documents never becomes a control token",
    "log_requests": "one JSON line a request on stderr",
    "otlp_traces_endpoint": "send OpenTelemetry spans there, as http://localhost:4318/v1/traces",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or Ctrl-C; exit code 0 then, 1 when it cannot start, 2 on usage errors."""
    parser = _parser()
    args = parser.parse(sys.argv[1:] if argv is None else argv)
    if args.model is None:
        parser.error("--model is required")
    settings = {f.name: getattr(args, f.name) for f in dataclasses.fields(ServerConfig)}
    for name in ("cors_origins", "image_hosts"):
        settings[name] = tuple(settings[name])
    for name in ("tool_call_parser", "reasoning_parser"):
        settings[name] = None if settings[name] == "none" else settings[name]
    config = ServerConfig(**settings)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("jaxinfer").setLevel(logging.INFO)

    from jaxinfer.server.auth import Keys

    for file in (config.api_keys_file, config.admin_keys_file):
        if file is not None:
            Keys(file)  # what is wrong with it is better said before the model is loaded
    print(f"loading {args.model}", file=sys.stderr, flush=True)
    llm = load_model(args)
    asyncio.run(_serve(llm, config))
    return 0


def served_model(llm: LLM, config: ServerConfig) -> ServedModel:
    """What the server needs to know of a model."""
    from jaxinfer.protocol.sampling import model_defaults
    from jaxinfer.server.context import ServedModel

    return ServedModel(
        name=config.served_model_name or llm.model_name,
        tokenizer=llm.tokenizer,
        chat_template=llm.chat_template,
        max_model_len=llm.max_model_len,
        vocab_size=llm.vocab_size,
        defaults=model_defaults(llm.generation_defaults),
        hidden_states=lambda ids: llm.hidden_states(ids, [-1])[-1],
        grammars=llm.engine.grammars,
        image_processor=llm.image_processor,
        facts=_facts(llm),
    )


def _facts(llm: LLM) -> dict[str, Any]:
    from jaxinfer import compat

    config, engine = llm.model_config, llm.engine
    arrays = [a for weight in llm.params for a in (weight if isinstance(weight, tuple) else (weight,))]
    return {
        "architecture": config.family,
        "parameters": sum(math.prod(weight.shape) for weight in llm.params),
        "weight_bytes": sum(array.nbytes for array in arrays),
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": llm.vocab_size,
        "chat_template": llm.chat_template is not None,
        "platform": compat.platform(),
        "max_num_seqs": engine.config.max_num_seqs,
        "page_size": engine.config.page_size,
        "num_pages": engine.num_pages,
    }


async def _serve(llm: LLM, config: ServerConfig) -> None:
    from jaxinfer.engine.service import EngineService
    from jaxinfer.server.context import ServerContext
    from jaxinfer.server.lifecycle import raise_file_limit, running, until_signal

    raise_file_limit()
    context = ServerContext(served_model(llm, config), EngineService(llm.engine), config)
    async with running(context) as url:
        print(f"serving {context.model.name} at {url}", file=sys.stderr, flush=True)
        await until_signal()
        print("draining", file=sys.stderr, flush=True)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="jaxinfer serve", description="Serve a model over the OpenAI API.")
    parser.add_argument("--model", metavar="M", help="preset, directory, .gguf file or hub id")
    add_engine_flags(parser)
    server = parser.add_argument_group("server")
    types = typing.get_type_hints(ServerConfig)
    for field in dataclasses.fields(ServerConfig):
        server.add_argument(f"--{field.name.replace('_', '-')}", **_flag(field, types[field.name]))
    return parser


def _flag(field: dataclasses.Field[Any], kind: Any) -> dict[str, Any]:
    text = _HELP[field.name]
    options: dict[str, Any] = {"dest": field.name, "default": field.default}
    if field.name in ("cors_origins", "image_hosts"):
        metavar = "ORIGIN" if field.name == "cors_origins" else "HOST"
        return {**options, "action": "append", "default": [], "metavar": metavar, "help": text}
    if kind is bool:
        from argparse import BooleanOptionalAction

        return {**options, "action": BooleanOptionalAction, "help": text}
    optional = field.default is None
    base = next((a for a in typing.get_args(kind) if a is not type(None)), kind)
    metavar = {int: "N", float: "SECONDS", str: "TEXT", Path: "FILE"}[base]
    shown = text if optional or "default" in text else f"{text} (default: {field.default})"
    return {**options, "type": base, "metavar": metavar, "help": shown}


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
