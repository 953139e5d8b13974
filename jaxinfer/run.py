"""`jaxinfer run`: answers one prompt, or a JSONL file of requests, on this machine.

Exit codes: 0 all answered, 1 some lines failed, 2 usage (arguments, files, model), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxinfer.batch.lines import ByteSource, read_lines
from jaxinfer.batch.output import OrderedOutput
from jaxinfer.batch.progress import ProgressDisplay, count_lines
from jaxinfer.batch.results import plain_answer
from jaxinfer.batch.runner import MAX_IN_FLIGHT, PLAIN_DEFAULTS, run_batch
from jaxinfer.cli import ArgumentParser, guarded
from jaxinfer.engine.request import RequestOutput
from jaxinfer.engine_flags import add_engine_flags, load_model
from jaxinfer.errors import ConfigError, JaxinferError
from jaxinfer.protocol.images import ImageOptions
from jaxinfer.protocol.parse import parse_chat_request, parse_plain_request
from jaxinfer.protocol.prompt import PreparedRequest, prepare
from jaxinfer.protocol.response import failure_of
from jaxinfer.protocol.sampling import model_defaults

if TYPE_CHECKING:  # imports JAX: only once the arguments are known to be good
    from jaxinfer.api import LLM

_MOST_SEQS = 64  # computed at once for one prompt, as in EngineConfig

# Flags that are request fields of the same name.
_REQUEST_FLAGS: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": int, "metavar": "N", "help": "most tokens to generate (default 128)"},
    "min_tokens": {"type": int, "metavar": "N", "help": "no end of text before this many tokens"},
    "temperature": {"type": float, "metavar": "X", "help": "0 is greedy (default 0), up to 2"},
    "top_p": {"type": float, "metavar": "X", "help": "sample from the smallest set with this probability"},
    "top_k": {"type": int, "metavar": "K", "help": "sample from the K most likely tokens; 0: all"},
    "min_p": {"type": float, "metavar": "X", "help": "drop tokens below this share of the likeliest one"},
    "presence_penalty": {"type": float, "metavar": "X", "help": "-2 to 2"},
    "frequency_penalty": {"type": float, "metavar": "X", "help": "-2 to 2"},
    "repetition_penalty": {"type": float, "metavar": "X", "help": "0.01 to 100; 1 is off"},
    "seed": {"type": int, "metavar": "S", "help": "the same seed gives the same text"},
    "n": {"type": int, "metavar": "N", "help": "completions of each prompt"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "end before this text (may be repeated)"},
    "ignore_eos": {"action": "store_true", "default": None, "help": "go on past the end of text"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return guarded(_main, sys.argv[1:] if argv is None else argv)


def _main(argv: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse(argv)
    _check_combination(parser, args)
    flags = {name: getattr(args, name) for name in _REQUEST_FLAGS if getattr(args, name) is not None}
    try:
        if args.prompt is not None:
            return _answer_prompt(args, flags)
        return _answer_file(args, flags)
    except JaxinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="jaxinfer run",
        usage="jaxinfer run --model M (--prompt TEXT | --input FILE --output FILE) [options]",
        description="Answer one prompt, or a JSONL file of requests. Greedy, 128 tokens, unless told otherwise.",
        epilog="A line of --input is OpenAI's batch form (custom_id, method, url, body), with OpenAI's defaults, or "
        'plain: {"prompt": …} or {"messages": […]} with sampling fields beside it. Flags are defaults for lines that '
        "do not set them. The same command goes on with an interrupted run; failed lines are kept.",
    )
    parser.add_argument("--model", metavar="M", help="a preset, a directory, a .gguf file or a hub id")
    work = parser.add_mutually_exclusive_group()
    work.add_argument(
        "--prompt",
        metavar="TEXT",
        help="print the model's answer to TEXT; one that begins with - is written --prompt=-TEXT",
    )
    work.add_argument(
        "--input", metavar="FILE", help="answer each line of this JSONL file; - is standard input"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="where the results go, one line each; - is standard output"
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="with --prompt: continue TEXT as it is, also where a chat template exists",
    )
    parser.add_argument("--system", metavar="TEXT", help="with --prompt: the system's turn before it")
    parser.add_argument("--json", action="store_true", help="with --prompt: print one JSON object")
    sampling = parser.add_argument_group("generation")
    for name, options in _REQUEST_FLAGS.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", dest=name, **options)
    add_engine_flags(parser)
    return parser


def _check_combination(parser: ArgumentParser, args: argparse.Namespace) -> None:
    if args.model is None:
        parser.error("--model is required")
    if args.prompt is None and args.input is None:
        parser.error("--prompt or --input is required")
    if args.system is not None and args.raw:
        parser.error("--system and --raw exclude each other: raw text has no turns")
    if args.input is None:
        if args.output is not None:
            parser.error("--output needs --input")
        return
    if args.output is None:
        parser.error("--input needs --output")
    for name in ("raw", "system", "json"):
        if getattr(args, name):
            parser.error(f"--{name} needs --prompt; a line of --input says itself what it is")


def _load(args: argparse.Namespace, **options: Any) -> LLM:
    with _status(f"loading {args.model}", plain=args.input is not None):
        return load_model(args, **options)


@contextlib.contextmanager
def _status(text: str, *, plain: bool) -> Iterator[None]:
    """Shows that something is going on: a spinner on a terminal; elsewhere, if `plain`, a line."""
    console = Console(stderr=True)
    if plain and not console.is_terminal:
        print(text, file=sys.stderr, flush=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield


# --prompt


def _answer_prompt(args: argparse.Namespace, flags: dict[str, Any]) -> int:
    parse_plain_request(_prompt_body(args, flags, chat=False), PLAIN_DEFAULTS)  # before the model is loaded

    start = time.perf_counter()
    # A single answer needs few of the programs that serving needs: compile them as they come.
    few = min(flags.get("n", 1), _MOST_SEQS)
    llm = _load(args, warm_up=False, max_num_seqs=few if args.max_num_seqs is None else args.max_num_seqs)
    loaded = time.perf_counter()
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{llm.model_name} has no tokenizer, so it cannot read --prompt: give it token ids, as a line "
            '{"prompt": [1, 2, 3]} of an --input file, or from Python'
        )
    chat = llm.chat_template is not None and not args.raw
    if args.system is not None and not chat:
        raise ConfigError(f"{llm.model_name} has no chat template: leave --system out")
    body = _prompt_body(args, flags, chat=chat)
    request = parse_plain_request(body, {**model_defaults(llm.generation_defaults), **PLAIN_DEFAULTS})
    prepared = prepare(
        request,
        tokenizer,
        llm.chat_template,
        max_model_len=llm.max_model_len,
        vocab_size=llm.vocab_size,
        images=ImageOptions(llm.image_processor),
    )
    first = None
    output = None
    shown = ""
    live = not args.json and prepared.params.n == 1
    for output in _generate(llm, prepared):
        first = first or time.perf_counter()
        if live:
            _print_rest(output.outputs[0].text, shown)
            shown = output.outputs[0].text
    assert output is not None
    assert first is not None
    problem = failure_of(output)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 1

    end = time.perf_counter()
    if args.json:
        result = plain_answer(prepared, output, tokenizer)
        result["prompt_token_ids"] = output.prompt_token_ids
        result["model"] = llm.model_name
        result["timing"] = {
            "load_s": round(loaded - start, 4),
            "first_token_s": round(first - loaded, 4),
            "generate_s": round(end - loaded, 4),
            "tokens_per_s": round(result["usage"]["completion_tokens"] / (end - loaded), 2),
        }
        print(json.dumps(result, ensure_ascii=False))
    elif live:
        if not shown.endswith("\n"):
            print()
    else:
        print("\n---\n".join(completion.text for completion in output.outputs))
    return 0


def _prompt_body(args: argparse.Namespace, flags: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    if not chat:
        return {"prompt": args.prompt, **flags}
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return {"messages": [*system, {"role": "user", "content": args.prompt}], **flags}


def _generate(llm: LLM, prepared: PreparedRequest) -> Iterator[RequestOutput]:
    request = prepared.request
    llm.engine.add_request(
        "prompt",
        prepared.prompts[0].token_ids,
        prepared.params,
        priority=request.priority,
        cache_salt=request.cache_salt,
        media=prepared.prompts[0].media,
    )
    finished = False
    while not finished:
        for output in llm.engine.step():
            finished = output.finished
            yield output


def _print_rest(text: str, shown: str) -> None:
    if len(text) > len(shown):
        sys.stdout.write(text[len(shown) :])
        sys.stdout.flush()


# --input


def _answer_file(args: argparse.Namespace, flags: dict[str, Any]) -> int:
    parse_chat_request({"messages": [{"role": "user", "content": ""}], **flags})  # are the flags possible?
    settings = json.dumps([args.model, args.dtype, args.weights, args.max_model_len, flags], sort_keys=True)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(_open_input(args.input))
        if args.input != "-" and os.path.exists(args.output) and os.path.samefile(args.input, args.output):
            raise ConfigError(f"--input and --output are the same file: {args.input}")
        output = OrderedOutput(sys.stdout.buffer if args.output == "-" else Path(args.output))
        stack.callback(output.close)
        total = count_lines(Path(args.input)) if os.path.isfile(args.input) else None
        llm = _load(args)
        interrupted = stack.enter_context(_first_interrupt())
        display = stack.enter_context(ProgressDisplay(total, Console(stderr=True)))
        progress = run_batch(
            llm,
            read_lines(source, settings),
            output,
            defaults=flags,
            max_in_flight=max(MAX_IN_FLIGHT, 2 * (args.max_num_seqs or 0)),
            on_progress=display,
            should_stop=lambda: bool(interrupted),
        )
        display.summary(progress)
    if progress.interrupted:
        return 130
    return 1 if progress.failed else 0


def _open_input(name: str) -> contextlib.AbstractContextManager[ByteSource]:
    if name == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return open(name, "rb")
    except OSError as e:
        raise ConfigError(f"cannot read {name}: {e.strerror}") from None


@contextlib.contextmanager
def _first_interrupt() -> Iterator[list[int]]:
    """Notes the first Ctrl-C in the list, so that the step in progress can end; the second one interrupts as usual."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)


if __name__ == "__main__":
    sys.exit(main())
