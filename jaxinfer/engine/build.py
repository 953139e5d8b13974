"""From a model's name to a running engine: open, choose sizes for the platform, load, compile."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer import compat
from jaxinfer.config.engine import EngineConfig
from jaxinfer.config.mesh import MeshConfig
from jaxinfer.config.model import ModelConfig
from jaxinfer.config.processes import ProcessConfig
from jaxinfer.engine.buckets import BucketTable
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.followers import LeadingRunner, LeadingTeacher, Telling, follow
from jaxinfer.engine.replicas import ReplicatedEngine
from jaxinfer.engine.runner import ModelRunner, RunningStage
from jaxinfer.engine.stages import choose_num_pages, count_lanes, make_stages, placement, stage_params
from jaxinfer.engine.steps import StepPrograms
from jaxinfer.engine.teacher import TeacherForcing
from jaxinfer.errors import ConfigError, JaxinferError
from jaxinfer.kv.manager import KVManager
from jaxinfer.models.base import DecoderModel
from jaxinfer.models.params import keep_blocks, param_specs
from jaxinfer.models.registry import family_for, make_tower
from jaxinfer.models.vision.tower import VisionTower
from jaxinfer.parallel.collectives import on_mesh
from jaxinfer.parallel.mesh import make_mesh, replica_meshes
from jaxinfer.parallel.processes import Follower, Leader, check_same, least, start_processes
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.load import Params, load_params
from jaxinfer.weights.open import open_checkpoint
from jaxinfer.weights.safetensors import read_json
from pallas_kernels import native
from pallas_kernels.linear import BlockWeights

_WEIGHTS = ("auto", "packed", "dense")
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Built:
    """A running engine and what it was made of; of several copies of a model, what the first was made of."""

    engine: Engine | ReplicatedEngine
    model: DecoderModel
    tower: VisionTower | None
    params: Params
    teacher: TeacherForcing
    tokenizer: Tokenizer | None
    generation_defaults: Mapping[str, Any]
    preprocessor: Mapping[str, Any]  # of preprocessor_config.json
    seconds: Mapping[str, float]  # that each phase took, in order


def build_engine(
    model: str | Path,
    *,
    dtype: str | None = None,
    weights: str = "auto",
    max_model_len: int | None = None,
    parallel: MeshConfig | None = None,
    processes: ProcessConfig | None = None,
    warm_up: bool = True,
    **options: Any,
) -> Built:
    """Opens, loads and compiles a model. In processes that another one leads it does not return, but ends them when that one does.

    Args:
      dtype: to serve in; None: as stored.
      weights: "packed" keeps matrices in the blocks of codes they are stored in, "dense" spreads them out into `dtype`; "auto"
        is "packed" where a kernel multiplies with them in place and no dtype is asked for.
      parallel: how many devices, and along which axes; None: one.
      processes: that share those devices; None: this one has them all.
      warm_up: compile everything now; else each program compiles when it is first needed.
      options: fields of EngineConfig.
    Raises:
      CheckpointError: the model cannot be read.
      ConfigError: the settings cannot work; the message names the numbers that disagree.
    """
    parallel = parallel or MeshConfig()
    if processes is not None and processes.several and parallel.pp > 1:
        raise ConfigError(f"pp={parallel.pp}: stages in several processes are not there yet; use tp or ep")
    group = start_processes(processes or ProcessConfig(), parallel)
    if group is None:
        compat.make_cpu_devices(parallel.num_devices)
    build = partial(_build, model, dtype, weights, max_model_len, warm_up, options)
    if parallel.dp > 1:
        copies = [build(mesh) for mesh in replica_meshes(parallel)]
        engines = cast("list[Engine]", [copy.engine for copy in copies])
        return dataclasses.replace(copies[0], engine=ReplicatedEngine(engines))
    mesh = make_mesh(parallel) if parallel.num_devices > 1 else None
    if not isinstance(group, Follower):
        return build(mesh, group)
    try:
        build(mesh, group)
    except Exception as e:
        group.fail(str(e) if isinstance(e, JaxinferError) else f"{type(e).__name__}: {e}")
    raise SystemExit(0)


def _build(
    model: str | Path,
    dtype: str | None,
    weights: str,
    max_model_len: int | None,
    warm_up: bool,
    options: Mapping[str, Any],
    mesh: Mesh | None,
    group: Leader | Follower | None = None,
) -> Built:
    """`build_engine` for one mesh; in a follower it returns once the leader ends."""
    compat.use_compilation_cache()
    clock = _Clock()
    checkpoint = open_checkpoint(model)
    family = family_for(checkpoint.config)
    config = checkpoint.model_config()
    served = serving_dtype(dtype, checkpoint.stored_dtype)
    if not isinstance(warm_up, bool):
        raise ConfigError(f"warm_up must be True or False, got {warm_up!r}")
    limit = config.max_model_len
    engine_config = engine_config_for(limit if max_model_len is None else max_model_len, options)
    if engine_config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the {limit} positions this model was made for"
        )
    # CPUs multiply in float32, so hidden states may as well keep its bits: the C++ kernels take them so.
    widen = compat.platform() == "cpu" and native.available()
    compute = jnp.dtype(jnp.float32) if widen else served
    packs = keeps_blocks(weights, dtype, can_multiply=widen)

    def make_module(**options: Any) -> DecoderModel:
        with on_mesh(mesh):
            made = family.model(
                config,
                dtype=served,
                compute_dtype=compute,
                max_len=engine_config.max_model_len,
                **options,
            )
        if packs:
            keep_blocks(made, checkpoint.block_kind)
        return made

    module = make_module()
    if weights == "packed" and not any(isinstance(s.value, BlockWeights) for s in param_specs(module)):
        raise ConfigError(f"weights='packed': {checkpoint.path} stores none in blocks of codes; use auto")
    with on_mesh(mesh):
        tower = make_tower(config, dtype=served, compute_dtype=compute)
    stages = make_stages(make_module, module, mesh, engine_config, served)
    groups = stages[0].model.page_groups
    clock.lap("open")
    if group is not None:
        check_same(repr((config, served, weights, engine_config, mesh and mesh.shape, warm_up)))
    params = load_params(module, checkpoint, placement(stages), tower=tower)
    tower_params = params[len(param_specs(module)) :]
    params_of = stage_params(stages, module, params)
    clock.lap("weights")

    lanes = count_lanes(stages)
    num_pages = choose_num_pages(engine_config, stages, lanes)
    if group is not None:
        num_pages = least(num_pages)
    engine_config = dataclasses.replace(engine_config, num_pages=num_pages * lanes)
    make_kv = partial(
        KVManager,
        num_pages,
        engine_config.page_size,
        groups,
        prefix_caching=engine_config.enable_prefix_caching,
    )
    # XLA's own bfloat16 products of fewer than 8 rows are naive loops on CPU.
    thin = compat.platform() == "cpu" and served == jnp.bfloat16 and not widen
    buckets = BucketTable(engine_config, min_rows=8 if thin else 2, microbatches=len(stages), lanes=lanes)
    width = -(-engine_config.max_model_len // engine_config.page_size)
    num_slots = engine_config.max_num_seqs + 1
    programs = [
        StepPrograms(
            stage.model,
            stage.cache,
            buckets,
            num_pages=num_pages,
            num_slots=num_slots,
            table_width=width,
            tower=tower if stage.model.stage.is_first else None,
            media_rows=engine_config.max_media_tokens,
            mesh=stage.mesh,
            keep=group is None,  # others' devices cannot be named in a kept program
        )
        for stage in stages
    ]
    if warm_up:
        for each in programs:
            each.compile_all()
    clock.lap("programs")
    tell = Telling(group) if isinstance(group, Leader) else None
    make_runner = partial(LeadingRunner, tell) if tell else ModelRunner
    make_teacher = partial(LeadingTeacher, tell) if tell else TeacherForcing
    running = [RunningStage(each, own) for each, own in zip(programs, params_of, strict=True)]
    runner = make_runner(running, tower_params, num_slots)
    if warm_up:
        runner.compile_links()
    teacher = make_teacher(stages, params_of, engine_config.max_model_len, tower, tower_params)
    if isinstance(group, Follower):
        follow(group, runner, teacher)
    tokenizer = checkpoint.tokenizer()
    engine = Engine(
        runner,
        [make_kv() for _ in range(lanes)],
        buckets,
        engine_config,
        tokenizer=tokenizer,
        eos_token_ids=end_ids(config, checkpoint.generation_config, tokenizer),
        vocab_size=config.vocab_size,
        table_width=width,
        image_token_id=None if tower is None else config.image_token_id,
        microbatches=len(stages),
    )
    clock.lap("tokenizer and cache")
    return Built(
        engine,
        module,
        tower,
        params,
        teacher,
        tokenizer,
        checkpoint.generation_config,
        _preprocessor(checkpoint),
        clock.seconds,
    )


def _preprocessor(checkpoint: Checkpoint) -> Mapping[str, Any]:
    file = checkpoint.path / "preprocessor_config.json"
    return read_json(file) if file.is_file() else {}


class _Clock:
    """Seconds between calls of `lap`, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def keeps_blocks(weights: str, dtype: str | None, *, can_multiply: bool) -> bool:
    """Whether weights that are stored in blocks of codes stay so."""
    if weights not in _WEIGHTS:
        raise ConfigError(f"weights must be one of {', '.join(_WEIGHTS)}, got {weights!r}")
    return weights == "packed" or (weights == "auto" and can_multiply and dtype in (None, "auto"))


def serving_dtype(asked: str | None, stored: str) -> Any:
    """The dtype to serve in. float16 checkpoints are served in float32: bfloat16 would lose bits of theirs."""
    name = asked if asked not in (None, "auto") else {"float16": "float32"}.get(stored, stored)
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; choose one of {', '.join(_DTYPES)}")
    return jnp.dtype(name)


def engine_config_for(max_model_len: int, options: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from user options; an unknown one is an error that lists the known."""
    known = {f.name for f in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"unknown engine option {unknown[0]!r}; known: {', '.join(sorted(known))}")
    return EngineConfig(max_model_len=max_model_len, **options)


def end_ids(
    config: ModelConfig, generation_config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> frozenset[int]:
    """Every token id that ends a text: generation_config.json's, else config.json's, and the tokenizer's own."""
    named = generation_config.get("eos_token_id")
    ids = set(config.eos_token_ids) if named is None else set(named if isinstance(named, list) else [named])
    return frozenset(ids | (tokenizer.eos_token_ids if tokenizer else set()))
