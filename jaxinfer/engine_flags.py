"""The flags that every command with an engine has, and the model they ask for. No JAX until it is loaded."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.api import LLM

_PARALLEL = {
    "tp": "devices that split heads, hidden widths and the vocabulary (tensor parallel)",
    "pp": "stages of consecutive layers (pipeline parallel)",
    "ep": "devices that split the experts of each mixture (expert parallel)",
    "dp": "copies of the model, each with requests and tp x pp x ep devices of its own (data parallel)",
}
_PROCESSES = {
    "coordinator": (
        str,
        "HOST:PORT",
        "several processes run the model: process 0's address, or auto on SLURM, Kubernetes and Open MPI",
    ),
    "num_processes": (int, "N", "with --coordinator: how many"),
    "process_id": (int, "I", "with --coordinator: which one this is; 0 serves, the others help it"),
}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of weights and arithmetic (default: by model)"
    )
    engine.add_argument(
        "--weights",
        choices=("auto", "packed", "dense"),
        default="auto",
        help="keep weights in the blocks of codes they are stored in, or spread them out (default: packed where that is faster)",
    )
    engine.add_argument(
        "--max-model-len", type=int, metavar="N", help="longest prompt and completion, tokens"
    )
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences computed at once")
    for name, text in _PARALLEL.items():
        engine.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{text} (default: 1)")
    for name, (kind, metavar, text) in _PROCESSES.items():
        engine.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)


def load_model(args: argparse.Namespace, **options: Any) -> LLM:
    """The model that the flags ask for; options: further ones of LLM, those that are None left out."""
    from jaxinfer.api import LLM

    chosen = {"max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs, **options}
    return LLM(
        args.model,
        dtype=args.dtype,
        weights=args.weights,
        **{name: getattr(args, name) for name in (*_PARALLEL, *_PROCESSES)},
        **{name: value for name, value in chosen.items() if value is not None},
    )
