#!/usr/bin/env python
"""What serving a model takes on GPUs that are not there: compiles the engine's own decode and prefill programs for them, with parameters that have
shapes and no values, and prints memory and collectives per device.

    python scripts/gpu_report.py --topology 8xh100 --model llama-3.1-70b --tp 4 --pp 2 [--json]

--model: a name in configs/models, a config.json, or a folder with one. No GPU is needed, but the extra cuda12 is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The devices compiled for are no backend of JAX's: its own are this machine's CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# What XLA logs here is that it cannot measure, and that a model takes more than the 80% of a device that XLA would plan with. Its errors are raised.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp

from jaxinfer.config.engine import EngineConfig
from jaxinfer.config.mesh import MeshConfig
from jaxinfer.config.published import published_config
from jaxinfer.engine.buckets import BucketTable
from jaxinfer.engine.modules import FlatModule
from jaxinfer.engine.stages import ModelStage, count_lanes, make_stages
from jaxinfer.engine.steps import StepPrograms
from jaxinfer.errors import JaxinferError
from jaxinfer.kv.manager import pages_for_one
from jaxinfer.models.base import DecoderModel
from jaxinfer.models.params import keep_blocks, param_specs
from jaxinfer.models.registry import family_for, make_tower
from jaxinfer.models.vision.tower import VisionTower
from jaxinfer.parallel.collectives import on_mesh
from jaxinfer.parallel.hlo import collectives
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.parallel.topology import Topology, topology
from pallas_kernels.linear import BlockKind


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of a program.

    Attributes:
      shape, num_bytes: of its result on one device.
      per_layer: count / layers that the program runs; None: it runs none.
    """

    kind: str
    shape: str
    axes: str
    num_bytes: int
    count: int
    per_layer: float | None


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program; bytes are those of one device.

    Attributes:
      argument_bytes: of the arguments that it reads.
      alias_bytes: of the results that take the place of arguments.
    """

    name: str
    seconds: float
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int
    collectives: list[Exchange]

    @property
    def extra_bytes(self) -> int:
        """What running it needs beside its arguments."""
        return self.temp_bytes + self.output_bytes - self.alias_bytes


@dataclass(frozen=True, slots=True)
class StageReport:
    """What each device of a pipeline stage holds and runs; the only one has all layers.

    Attributes:
      layers: the first, and the one after the last.
      state_bytes: of the sampler's rows and, for models that see, of the buffer of image embeddings.
    """

    layers: tuple[int, int]
    weights_bytes: int
    kv_bytes: int
    state_bytes: int
    programs: list[Program]

    @property
    def running_bytes(self) -> int:
        """What the hungriest program needs beside its arguments; programs run one after the other."""
        return max(program.extra_bytes for program in self.programs)

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.state_bytes + self.running_bytes


@dataclass(frozen=True, slots=True)
class Report:
    """hbm_bytes: of one device."""

    model: str
    topology: str
    mesh: dict[str, int]
    engine: dict[str, int]
    parameters: int
    hbm_bytes: int
    stages: list[StageReport]


def report(
    name: str,
    config_json: Mapping[str, Any],
    target: Topology,
    parallel: MeshConfig,
    engine: EngineConfig,
    *,
    dtype: str,
) -> Report:
    """Builds what `build_engine` builds, on devices that are not there."""
    family = family_for(config_json)
    config = family.config_from_hf(config_json)
    mesh = make_mesh(parallel, target.devices())
    served = jnp.dtype(dtype)
    kinds = int4_kinds(config_json)

    def make(**options: Any) -> DecoderModel:
        with on_mesh(mesh):
            module = family.model(
                config, dtype=served, compute_dtype=served, max_len=engine.max_model_len, **options
            )
        keep_blocks(module, kinds)
        return module

    whole = make()
    with on_mesh(mesh):
        tower = make_tower(config, dtype=served, compute_dtype=served)
    stages = make_stages(make, whole, mesh, engine, served)
    buckets = BucketTable(engine, microbatches=len(stages), lanes=count_lanes(stages))
    return Report(
        model=name,
        topology=f"{target.count}x{target.kind}",
        mesh=asdict(parallel),
        engine={
            "batch": engine.max_num_seqs,
            "context": engine.max_model_len,
            "prefill": engine.max_prefill_tokens,
            "page_size": engine.page_size,
        },
        parameters=sum(
            math.prod(spec.shape) for part in (whole, tower) if part is not None for spec in param_specs(part)
        ),
        hbm_bytes=target.memory_bytes,
        stages=[
            stage_report(stage, buckets, engine, tower if stage is stages[0] else None) for stage in stages
        ],
    )


def stage_report(
    stage: ModelStage, buckets: BucketTable, engine: EngineConfig, tower: VisionTower | None
) -> StageReport:
    """Compiles a stage's largest programs."""
    model, place = stage.model, stage.model.stage
    one = pages_for_one(engine.max_model_len, engine.max_prefill_tokens, engine.page_size, model.page_groups)
    programs = StepPrograms(
        model,
        stage.cache,
        buckets,
        num_pages=one * buckets.lane_rows + 1,
        num_slots=engine.max_num_seqs + 1,
        table_width=-(-engine.max_model_len // engine.page_size),
        tower=tower,
        media_rows=engine.max_media_tokens,
        mesh=stage.mesh,
    )
    decode = buckets.fit(buckets.row_sizes[-1], 0)
    prefill = max((b for b in buckets.all() if not b.decode), key=lambda b: b.num_tokens)
    layers = len(place.layers)
    compiled = [
        measure(f"decode, {decode.decode} tokens", lambda: programs.forward(decode), layers),
        measure(f"prefill, {prefill.num_tokens} tokens", lambda: programs.forward(prefill), layers),
    ]
    flat = [FlatModule(part, stage.mesh) for part in (model, tower) if part is not None]
    state = argument_bytes(programs.forward(decode), 4)
    if place.is_last:
        rows = max(bucket.samples for bucket in buckets.all())
        compiled += [
            measure(f"sample, {rows} rows", lambda: programs.sample(rows, False)),
            measure(f"sample in full, {rows} rows", lambda: programs.sample(rows, True)),
        ]
        state += argument_bytes(programs.sample(rows, True), 5)
    return StageReport(
        layers=(place.layers.start, place.layers.stop),
        weights_bytes=sum(bytes_on_one(s, s.sharding) for part in flat for s in jax.tree.leaves(part.shapes)),
        kv_bytes=argument_bytes(programs.forward(decode), 1),
        state_bytes=state,
        programs=compiled,
    )


def measure(name: str, make: Callable[[], Any], layers: int | None = None) -> Program:
    """Compiles a program and reads what it needs. layers: that it runs."""
    start = time.perf_counter()
    program = make()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    exchanges = [
        Exchange(**asdict(what), count=count, per_layer=layers and round(count / layers, 2))
        for what, count in sorted(collectives(program.as_text()).items())
    ]
    return Program(
        name,
        seconds,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        exchanges,
    )


def argument_bytes(program: Any, index: int) -> int:
    """Of one argument, on one device; what the program does not use is left out."""
    shapes, shardings = program.args_info[0][index], program.input_shardings[0][index]
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(bytes_on_one(shape, sharding) for shape, sharding in pairs)


def bytes_on_one(array: Any, sharding: jax.sharding.Sharding) -> int:
    return math.prod(sharding.shard_shape(array.shape)) * jnp.dtype(array.dtype).itemsize


def int4_kinds(config_json: Mapping[str, Any]) -> Callable[[str], BlockKind | None]:
    """How a checkpoint with this config stores each tensor, as PackedCheckpoint finds it: matrices of compressed-tensors' INT4 stay packed."""
    text = config_json.get("text_config", config_json)
    quantization = config_json.get("quantization_config") or text.get("quantization_config") or {}
    if quantization.get("quant_method") != "compressed-tensors":
        return lambda name: None
    ignored = [
        part.removeprefix("re:") if part.startswith("re:") else re.escape(part)
        for part in quantization.get("ignore", ())
    ]
    # A router is no `Linear` of PyTorch's, which is what these checkpoints quantise.
    ignored += [r".*\.(gate|router)", r".*embed_tokens"]

    def kind(name: str) -> BlockKind | None:
        plain = any(
            re.match(rf"(language_model\.)?(model\.)?({p})$", name.removesuffix(".weight")) for p in ignored
        )
        return None if plain else "int4_symmetric"

    return kind


def read_config(name: str) -> Mapping[str, Any]:
    """The config.json that --model names. ConfigError when there is none."""
    for path in (Path(name), Path(name) / "config.json"):
        if path.is_file():
            return json.loads(path.read_text())
    return published_config(name)


def show(found: Report) -> str:
    """Markdown."""
    mesh = " x ".join(f"{axis} {n}" for axis, n in found.mesh.items() if n > 1) or "one device"
    sizes = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in found.engine.items())
    lines = [
        f"### {found.model} on {found.topology}, {mesh}",
        "",
        f"{size(found.parameters, 1000)} parameters; {sizes}.",
    ]
    for i, stage in enumerate(found.stages):
        if len(found.stages) > 1:
            lines += ["", f"**Stage {i}**, layers {stage.layers[0]} to {stage.layers[1] - 1}"]
        lines += show_stage(stage, found.hbm_bytes)
    return "\n".join(lines)


def show_stage(stage: StageReport, hbm_bytes: int) -> list[str]:
    free = hbm_bytes - stage.total_bytes
    parts = {
        "weights": stage.weights_bytes,
        "KV cache": stage.kv_bytes,
        "sampler state and image rows": stage.state_bytes,
        "temporaries and results of the hungriest program": stage.running_bytes,
        "**in all**": stage.total_bytes,
        "**free**" if free >= 0 else "**missing: it does not fit**": abs(free),
    }
    lines = [
        "",
        "| on each device | bytes | of its memory |",
        "|---|---:|---:|",
        *(f"| {name} | {size(part)} | {part / hbm_bytes:.1%} |" for name, part in parts.items()),
        "",
        "| program | compiled in | arguments | temporaries | results | of these, in place of arguments |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {p.name} | {p.seconds:.0f} s | "
            + " | ".join(map(size, (p.argument_bytes, p.temp_bytes, p.output_bytes, p.alias_bytes)))
            + " |"
            for p in stage.programs
        ),
    ]
    if not any(p.collectives for p in stage.programs):
        return lines
    return [
        *lines,
        "",
        "| program | collective | along | result | bytes | count | a layer |",
        "|---|---|---|---|---:|---:|---:|",
        *(
            f"| {p.name} | {x.kind} | {x.axes} | {x.shape} | {size(x.num_bytes)} | {x.count} | "
            f"{'' if x.per_layer is None else f'{x.per_layer:g}'} |"
            for p in stage.programs
            for x in p.collectives
        ),
    ]


def size(number: float, step: int = 1024) -> str:
    """A number with a prefix: of bytes, or of plain things in steps of 1000."""
    units = ("B", "KiB", "MiB", "GiB", "TiB") if step == 1024 else ("", "k", "M", "G", "T")
    power = min(int(math.log(max(number, 1), step)), len(units) - 1)
    return f"{number / step**power:,.{2 if power else 0}f} {units[power]}".strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", required=True, help="COUNTxKIND, such as 8xh100")
    parser.add_argument("--model", required=True, help="name in configs/models, config.json, or folder")
    for name in ("tp", "pp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", help="to serve in (default: bfloat16)")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step (default: 64)")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each (default: 8192)")
    parser.add_argument("--prefill", type=int, default=2048, help="prompt tokens in a step (default: 2048)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens a KV page holds (default: 64)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        found = report(
            Path(args.model).stem if args.model.endswith(".json") else Path(args.model).name,
            read_config(args.model),
            topology(args.topology),
            MeshConfig(pp=args.pp, ep=args.ep, tp=args.tp),
            EngineConfig(
                max_model_len=args.context,
                max_num_seqs=args.batch,
                max_prefill_tokens=args.prefill,
                prefill_block=max(args.page_size, 32),
                page_size=args.page_size,
            ),
            dtype=args.dtype,
        )
    except JaxinferError as e:
        sys.exit(f"error: {e}")
    if args.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print(show(found))


if __name__ == "__main__":
    main()
