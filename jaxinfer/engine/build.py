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
from jax.sharding import Mesh, NamedSharding

from jaxinfer import compat
from jaxinfer.config.engine import EngineConfig
from jaxinfer.config.mesh import MeshConfig
from jaxinfer.config.model import ModelConfig
from jaxinfer.config.processes import ProcessConfig
from jaxinfer.engine.buckets import BucketTable
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.followers import LeadingRunner, LeadingTeacher, Telling, follow
from jaxinfer.engine.replicas import ReplicatedEngine
from jaxinfer.engine.runner import ModelRunner
from jaxinfer.engine.steps import StepPrograms
from jaxinfer.engine.teacher import TeacherForcing
from jaxinfer.errors import ConfigError, JaxinferError
from jaxinfer.kv.cache import CacheSpec
from jaxinfer.kv.manager import KVManager, pages_for_one
from jaxinfer.models.base import DecoderModel
from jaxinfer.models.params import ParamSpec, keep_blocks
from jaxinfer.models.registry import family_for, make_tower
from jaxinfer.models.vision.tower import VisionTower
from jaxinfer.parallel.collectives import on_mesh
from jaxinfer.parallel.mesh import make_mesh, replica_meshes, sharding
from jaxinfer.parallel.processes import Follower, Leader, check_same, least, start_processes
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.load import Params, load_params
from jaxinfer.weights.open import open_checkpoint
from jaxinfer.weights.safetensors import read_json
from pallas_kernels import native

_WEIGHTS = ("auto", "packed", "dense")
_DTYPES = ("float32", "bfloat16")
_KV_DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
_CPU_KV_BYTES = 2**30
_GPU_KV_SHARE = 0.9  # of the memory that weights leave free


@dataclass(frozen=True, slots=True)
class Built:
    """A running engine and what it was made of; of several copies of a model, what the first was made of."""

    engine: Engine | ReplicatedEngine
    programs: StepPrograms
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
    with on_mesh(mesh):
        module = family.model(
            config, dtype=served, compute_dtype=compute, max_len=engine_config.max_model_len
        )
        tower = make_tower(config, dtype=served, compute_dtype=compute)
    clock.lap("open")
    if keeps_blocks(weights, dtype, can_multiply=widen):
        kept = keep_blocks(module, checkpoint.block_kind)
        if weights == "packed" and not kept:
            raise ConfigError(f"weights='packed': {checkpoint.path} stores none in blocks of codes; use auto")
    if group is not None:
        check_same(repr((config, served, weights, engine_config, mesh and mesh.shape, warm_up)))
    params = load_params(module, checkpoint, mesh and partial(_sharding, mesh), tower=tower)
    clock.lap("weights")

    spec = cache_spec(module, engine_config, served)
    num_pages = choose_num_pages(engine_config, spec, module, mesh)
    if group is not None:
        num_pages = least(num_pages)
    engine_config = dataclasses.replace(engine_config, num_pages=num_pages)
    kv = KVManager(
        num_pages,
        engine_config.page_size,
        module.page_groups,
        prefix_caching=engine_config.enable_prefix_caching,
    )
    # XLA's own bfloat16 products of fewer than 8 rows are naive loops on CPU.
    thin = compat.platform() == "cpu" and served == jnp.bfloat16 and not widen
    buckets = BucketTable(engine_config, min_rows=8 if thin else 2)
    width = -(-engine_config.max_model_len // engine_config.page_size)
    num_slots = engine_config.max_num_seqs + 1
    programs = StepPrograms(
        module,
        spec,
        buckets,
        num_pages=num_pages,
        num_slots=num_slots,
        table_width=width,
        tower=tower,
        media_rows=engine_config.max_media_tokens,
        mesh=mesh,
        keep=group is None,  # others' devices cannot be named in a kept program
    )
    if warm_up:
        programs.compile_all()
    clock.lap("programs")
    tell = Telling(group) if isinstance(group, Leader) else None
    make_runner = partial(LeadingRunner, tell) if tell else ModelRunner
    make_teacher = partial(LeadingTeacher, tell) if tell else TeacherForcing
    runner = make_runner(programs, params, programs.new_cache()(), num_slots)
    teacher = make_teacher(module, params, spec, engine_config.max_model_len, tower=tower, mesh=mesh)
    if isinstance(group, Follower):
        follow(group, runner, teacher)
    tokenizer = checkpoint.tokenizer()
    engine = Engine(
        runner,
        kv,
        buckets,
        engine_config,
        tokenizer=tokenizer,
        eos_token_ids=end_ids(config, checkpoint.generation_config, tokenizer),
        vocab_size=config.vocab_size,
        table_width=width,
        image_token_id=None if tower is None else config.image_token_id,
    )
    clock.lap("tokenizer and cache")
    return Built(
        engine,
        programs,
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


def _sharding(mesh: Mesh, spec: ParamSpec) -> NamedSharding:
    """Where a parameter goes."""
    return sharding(mesh, spec.axes, spec.shape, spec.sources[0])


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


def cache_spec(module: DecoderModel, engine: EngineConfig, served: Any) -> CacheSpec:
    """Shape of the KV cache."""
    name = str(served) if engine.kv_dtype == "auto" else engine.kv_dtype
    if name not in _KV_DTYPES:
        raise ConfigError(
            f"kv_dtype {name!r} is not supported; choose auto or one of {', '.join(_KV_DTYPES)}"
        )
    return CacheSpec(
        **dataclasses.asdict(module.cache_layout),
        page_size=engine.page_size,
        dtype=jnp.dtype(name),
    )


def choose_num_pages(
    engine: EngineConfig, spec: CacheSpec, module: DecoderModel, mesh: Mesh | None = None
) -> int:
    """Pages that fit the memory asked for, at least one longest sequence's and at most what all slots could use."""
    groups = module.page_groups
    one = pages_for_one(engine.max_model_len, engine.max_prefill_tokens, engine.page_size, groups)
    if engine.num_pages is not None:
        given, name = engine.num_pages, f"num_pages={engine.num_pages}"
    elif engine.kv_cache_bytes is not None:
        given = engine.kv_cache_bytes // spec.bytes_per_page
        name = f"kv_cache_bytes={engine.kv_cache_bytes} ({given} pages)"
    else:
        on_cpu = compat.platform() == "cpu"
        free = compat.free_memory(mesh)
        budget = min(_CPU_KV_BYTES, free // 2) if on_cpu else int(free * _GPU_KV_SHARE)
        return min(max(budget // spec.bytes_per_page, one + 1), one * engine.max_num_seqs + 1)
    if given < one + 1:
        raise ConfigError(
            f"{name} is less than the {one + 1} pages of {spec.bytes_per_page} bytes that one sequence of "
            f"max_model_len={engine.max_model_len} needs: raise it or lower max_model_len"
        )
    return given


def end_ids(
    config: ModelConfig, generation_config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> frozenset[int]:
    """Every token id that ends a text: generation_config.json's, else config.json's, and the tokenizer's own."""
    named = generation_config.get("eos_token_id")
    ids = set(config.eos_token_ids) if named is None else set(named if isinstance(named, list) else [named])
    return frozenset(ids | (tokenizer.eos_token_ids if tokenizer else set()))
