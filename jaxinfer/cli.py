"""The `jaxinfer` command: sends each subcommand to its module, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import difflib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jaxinfer
from jaxinfer.errors import JaxinferError

# Subcommand: (function taking its arguments and returning the exit code, one line of help).
# Only the module of the subcommand asked for is imported.
COMMANDS = {
    "run": ("jaxinfer.run:main", "answer a prompt, or a JSONL file of requests"),
    "serve": ("jaxinfer.serve:main", "serve the OpenAI API over HTTP"),
    "bench": ("jaxinfer.bench:main", "throughput, TTFT and inter-token latency of the engine"),
    "models": ("jaxinfer.models_command:main", "list what can be run and how large it is, or fetch a preset"),
}


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, but flags are never abbreviated, and a usage error is one line on stderr and exit code 2.

    Argparse looks for what is required first, so what a command requires is better checked after `parse`: a mistyped
    flag is then named as such.
    """

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        if unknown:
            name = next((word for word in unknown if word.startswith("-")), unknown[0]).split("=")[0]
            known = set(re.findall(r"--[a-z][a-z-]*", self.format_help()))
            close = difflib.get_close_matches(name, sorted(known), 1, 0.7)
            self.error(f"unknown argument {name}" + (f", did you mean {close[0]}?" if close else ""))
        return args

    def error(self, message: str) -> NoReturn:
        value_missing = re.search(r"(--[a-z-]+): expected one argument", message)
        if value_missing:
            message += f" (one that begins with - is written {value_missing[1]}=-…)"
        self.exit(2, f"error: {message}; see '{self.prog} --help'\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jaxinfer ARGV` and returns its exit code: 0, 1 error, 2 usage, 130 interrupted."""
    return guarded(_dispatch, sys.argv[1:] if argv is None else argv)


def guarded(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Runs a command's main as an entry point should: no traceback for what a user can mend.

    Returns command's exit code; 1 after a JaxinferError (printed on stderr), 130 after Ctrl-C, 141 when the
    reader of stdout went away (128 + SIGPIPE, as a shell counts). A usage error is argparse's SystemExit(2).
    """
    try:
        code = command(argv)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a closed pipe can still be caught
        return code
    except JaxinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; let it have somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _dispatch(argv: Sequence[str]) -> int:
    listing = "\n".join(f"  {name:8} {text}" for name, (_, text) in COMMANDS.items())
    parser = ArgumentParser(
        prog="jaxinfer",
        usage="jaxinfer [--version] COMMAND ...",
        description=f"LLM inference on JAX.\n\ncommands:\n{listing}",
        epilog="'jaxinfer COMMAND --help' says more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jaxinfer {jaxinfer.__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    command = parser.parse(argv[:1]).command
    if command is None:
        parser.error(f"a command is required: {' or '.join(COMMANDS)}")
    target, _ = COMMANDS[command]
    return pkgutil.resolve_name(target)(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
