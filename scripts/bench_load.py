#!/usr/bin/env python
"""How fast a checkpoint of a gigabyte is loaded, against `cat`, and how much host memory that takes. Prints JSON.

A made-up bfloat16 Llama in four shards, in the page cache. `cat FILES > /dev/null` and `load_params` take turns; the first round of
each is not in the medians: a virtual machine may have to get its memory from its host first. Memory is measured in a process of its own: the most it held while loading, less what it held
before and less the weights.

    python scripts/bench_load.py [--rounds 7] [--dtype bfloat16 float32] [--orbax] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxinfer.models.base import DecoderModel
from jaxinfer.models.params import param_specs
from jaxinfer.models.registry import family_for
from jaxinfer.weights.checkpoint import Params
from jaxinfer.weights.load import load_params
from jaxinfer.weights.open import open_checkpoint

CONFIG = {
    "model_type": "llama",
    "vocab_size": 16384,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
SHARDS = 4


def open_model(dtype: str, folder: Path) -> DecoderModel:
    config = json.loads((folder / "config.json").read_text())
    family = family_for(config)
    return family.model(family.config_from_hf(config), dtype=np.dtype(dtype))


def write_checkpoint(folder: Path) -> int:
    """Writes random weights; returns the bytes of the largest tensor."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)
    shapes = {
        name: shape
        for spec in param_specs(open_model("bfloat16", folder))
        for name, shape in zip(spec.sources, spec.source_shapes, strict=True)
    }
    weight_map = {}
    for i in range(SHARDS):
        file = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        part = {
            name: np.frombuffer(rng.bytes(2 * int(np.prod(shapes[name]))), ml_dtypes.bfloat16).reshape(
                shapes[name]
            )
            for name in sorted(shapes)[i::SHARDS]
        }
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return max(2 * int(np.prod(shape)) for shape in shapes.values())


def load(folder: Path, dtype: str) -> Params:
    return jax.block_until_ready(load_params(open_model(dtype, folder), open_checkpoint(folder)))


def memory(field: str) -> int:
    """A field of this process's memory, bytes: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def measure_memory(folder: Path, dtype: str) -> None:
    jax.devices()
    open_checkpoint(folder)
    before = memory("VmRSS")
    params = load(folder, dtype)
    weights = sum(part.nbytes for part in jax.tree.leaves(params))
    peak = memory("VmHWM")
    print(json.dumps({"weights": weights, "peak above weights": peak - before - weights}))


def seconds(action) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def save_with_orbax(source: Path, folder: Path, dtype: str) -> None:
    from jaxinfer.weights.orbax import save_parameters

    specs = param_specs(open_model(dtype, source))
    save_parameters(folder, specs, load(source, dtype), open_checkpoint(source))


def measure_speed(folder: Path, files: list[Path], dtype: str, rounds: int) -> dict[str, object]:
    size = sum(file.stat().st_size for file in files)
    command = f"cat {shlex.join(map(str, files))} > /dev/null"
    cat, ours = [], []
    for _ in range(rounds + 1):
        cat.append(seconds(lambda: subprocess.run(command, shell=True, check=True)))
        ours.append(seconds(lambda: load(folder, dtype)))
    typical = {"cat": statistics.median(cat[1:]), "load": statistics.median(ours[1:])}
    return {
        **{f"{name} GB/s": round(size / value / 1e9, 2) for name, value in typical.items()},
        "load over cat": round(typical["cat"] / typical["load"], 2),
        "best over best": round(min(cat) / min(ours), 2),
        "first load, seconds": round(ours[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory of loading a 1 GB checkpoint.")
    parser.add_argument("--rounds", type=int, default=7, help="0: memory alone")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=("bfloat16", "float32"))
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made; it is removed afterwards")
    parser.add_argument("--orbax", action="store_true", help="load parameters saved with Orbax instead")
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        measure_memory(args.memory_of, args.dtype[0])
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        source = Path(name)
        report: dict[str, object] = {"largest tensor": write_checkpoint(source)}
        for dtype in args.dtype:
            folder = source
            if args.orbax:
                folder = source / f"saved-{dtype}"
                save_with_orbax(source, folder, dtype)
            files = [f for f in folder.rglob("*") if f.is_file() and f.stat().st_size > 1 << 20]
            child = [sys.executable, __file__, "--memory-of", str(folder), "--dtype", dtype]
            output = subprocess.run(child, stdout=subprocess.PIPE, check=True).stdout
            memory_use = json.loads(output.splitlines()[-1])
            speed = measure_speed(folder, files, dtype, args.rounds) if args.rounds else {}
            report[dtype] = {**memory_use, **speed}
        print(json.dumps(report))


if __name__ == "__main__":
    main()
