"""Vision towers against rows that transformers 5.24 computed.

vision_rows.safetensors holds them: the oracles' checkpoints in float32 on a CPU (eager attention), with the pixels recorded in
the oracle ("llama4", "kimi") or `waves` of other grids. Features are what `get_image_features` returns; Llama 4's are then
put through `multi_modal_projector`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from oracles import DIRECTORY
from safetensors.numpy import load_file

from jaxinfer.config.mesh import MeshConfig
from jaxinfer.config.vision import (
    Llama4VisionConfig,
    MoonViTConfig,
    llama4_vision_from_hf,
    moonvit_from_hf,
)
from jaxinfer.errors import ConfigError
from jaxinfer.models.layers import vision
from jaxinfer.models.params import param_specs
from jaxinfer.models.vision.layout import Grid, Layout, cubic_taps, make_layout
from jaxinfer.models.vision.llama4 import Llama4Vision
from jaxinfer.models.vision.moonvit import MoonViT
from jaxinfer.parallel.collectives import on_mesh
from jaxinfer.parallel.mesh import make_mesh, partition

EXPECTED = load_file(Path(__file__).parent / "vision_rows.safetensors")
TOLERANCE = 5e-6  # of the rows' standard deviation
GRIDS: dict[str, list[Grid]] = {
    "kimi_wide": [(1, 2, 14)],
    "kimi_tall": [(1, 12, 4)],
    "kimi_large": [(1, 10, 12)],  # larger than the 8 x 8 position table
    "kimi_table": [(1, 8, 8)],
    "kimi_clip": [(2, 4, 6)],
    "kimi_mixed": [(1, 6, 2), (2, 2, 4), (1, 4, 10)],
}


@functools.cache
def read(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    folder = DIRECTORY / name
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors"), load_file(folder / "expected.safetensors")


def filled(tower: nnx.Module, tensors: dict[str, np.ndarray]) -> Any:
    """The tower with a checkpoint's values, as a loader would give them."""
    graph, state = nnx.split(tower)
    values = []
    for spec in param_specs(tower):
        assert isinstance(spec.value, jax.ShapeDtypeStruct)
        joined = np.concatenate([tensors[source].astype(np.float32) for source in spec.sources])
        values.append(jnp.asarray(joined.reshape(spec.shape), spec.value.dtype))
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), values))


def waves(grids: list[Grid]) -> jax.Array:
    count = sum(map(math.prod, grids))
    return jnp.asarray(np.sin(np.arange(count * 48.0)).reshape(count, 3, 4, 4), jnp.float32)


@functools.cache
def declared(name: str, dtype: Any = jnp.float32, **changes: Any) -> Any:
    """An oracle's tower without values."""
    config = read(name)[0]
    if name == "kimi_k25":
        tower = moonvit_from_hf(config)
        assert tower is not None
        return MoonViT(dataclasses.replace(tower, **changes), dtype=dtype)
    tower = llama4_vision_from_hf(config)
    assert tower is not None
    return Llama4Vision(dataclasses.replace(tower, **changes), dtype=dtype)


@functools.cache
def kimi(dtype: Any = jnp.float32, **changes: Any) -> MoonViT:
    return filled(declared("kimi_k25", dtype, **changes), read("kimi_k25")[1])


@functools.cache
def llama4(dtype: Any = jnp.float32, **changes: Any) -> Llama4Vision:
    return filled(declared("llama4_vision", dtype, **changes), read("llama4_vision")[1])


def tiles() -> jax.Array:
    return jnp.asarray(read("llama4_vision")[2]["pixel_values"])


def rows_of(tower: Any, pixels: jax.Array, grids: list[Grid] | None = None) -> jax.Array:
    return jax.jit(lambda pixels: tower(pixels, grids))(pixels)


def error(rows: jax.Array, name: str) -> float:
    expected = EXPECTED[name]
    assert rows.shape == expected.shape
    return float(np.abs(rows - expected).max() / expected.std())


def test_llama4_tiles():
    assert error(rows_of(llama4(), tiles()), "llama4") < TOLERANCE
    assert error(rows_of(llama4(rope_theta=100.0), tiles()), "llama4_theta_100") < TOLERANCE


def test_kimi_images():
    expected = read("kimi_k25")[2]
    grids = [tuple(grid) for grid in expected["image_grid_thw"].tolist()]
    assert error(rows_of(kimi(), jnp.asarray(expected["pixel_values"]), grids), "kimi") < TOLERANCE
    assert (
        error(rows_of(kimi(rope_theta=100.0), waves([(1, 4, 6)]), [(1, 4, 6)]), "kimi_theta_100") < TOLERANCE
    )


@pytest.mark.parametrize("name", GRIDS)
def test_kimi_grids_of_other_shapes(name: str):
    assert error(rows_of(kimi(), waves(GRIDS[name]), GRIDS[name]), name) < TOLERANCE


def test_towers_use_every_vision_tensor():
    for name in ("llama4_vision", "kimi_k25"):
        used = {source for spec in param_specs(declared(name)) for source in spec.sources}
        stored = {x for x in read(name)[1] if not x.startswith("language_model.")}
        assert used == stored


def test_one_program_serves_images_of_many_shapes():
    tower = kimi()
    shapes = []

    def encode(pixels: jax.Array, layout: Layout) -> jax.Array:
        shapes.append(pixels.shape)
        return tower.encode(pixels, layout)

    compiled = jax.jit(encode)
    for name in ("kimi_wide", "kimi_tall", "kimi_large", "kimi_table"):
        pixels = waves(GRIDS[name])
        padded = jnp.pad(pixels, ((0, 128 - len(pixels)), (0, 0), (0, 0), (0, 0)), constant_values=9.0)
        rows = compiled(padded, make_layout(tower.config, GRIDS[name], 128))
        assert rows.shape == (32, 64)
        assert np.isfinite(rows).all()
        assert error(rows[: len(EXPECTED[name])], name) < TOLERANCE
    assert len(shapes) == 1


@pytest.mark.parametrize("turn", [1, 3, 6, 7])
@pytest.mark.parametrize("cut", [True, False])
def test_attention_takes_some_queries_at_a_time(turn: int, cut: bool, monkeypatch: pytest.MonkeyPatch):
    batch, count, heads = 2, 7, 3
    q, k, v = np.random.default_rng(0).standard_normal((3, batch, count, heads, 4)).astype(np.float32)
    segments = np.array([[0, 0, 1, 1, 1, 2, 0], [5, 5, 5, 5, 5, 5, -1]], np.int32)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / 2
    if cut:
        scores[~np.broadcast_to((segments[:, :, None] == segments[:, None])[:, None], scores.shape)] = -np.inf
    chances = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = np.einsum("bhqk,bkhd->bqhd", chances, v)
    monkeypatch.setattr(vision, "_MOST_SCORES", turn * batch * heads * count)
    numbers = jnp.asarray(segments) if cut else None
    mixed = vision.attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), numbers)
    np.testing.assert_allclose(mixed, expected, atol=1e-5)


def test_bfloat16_stays_close():
    """A few of bfloat16's 8 bits are lost on the way through the blocks."""
    for rows, name in (
        (rows_of(llama4(jnp.bfloat16), tiles()), "llama4"),
        (rows_of(kimi(jnp.bfloat16), waves(GRIDS["kimi_large"]), GRIDS["kimi_large"]), "kimi_large"),
    ):
        assert rows.dtype == jnp.bfloat16
        assert np.abs(rows.astype(jnp.float32) - EXPECTED[name]).mean() / EXPECTED[name].std() < 2**-5


@pytest.mark.parametrize("tp", [2, 4])
def test_devices_split_heads_and_hidden_values(tp: int):
    mesh = make_mesh(MeshConfig(tp=tp))
    grids = GRIDS["kimi_large"]
    cases = [
        ("llama4_vision", llama4(), lambda tower: tower(tiles()), "llama4"),
        ("kimi_k25", kimi(), lambda tower: tower(waves(grids), grids), "kimi_large"),
    ]
    for oracle, whole, run, name in cases:
        with on_mesh(mesh):
            graph, state = nnx.split(type(whole)(whole.config, dtype=jnp.float32))
        treedef = jax.tree.structure(state)
        declarations = param_specs(declared(oracle))
        specs = tuple(partition(spec.axes, spec.sources[0]) for spec in declarations)
        assert sum(any(spec) for spec in specs) >= 10

        def on_one(*params, graph=graph, treedef=treedef, run=run):
            with on_mesh(mesh):
                return run(nnx.merge(graph, jax.tree.unflatten(treedef, params)))

        split = jax.shard_map(on_one, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        values = jax.tree.leaves(nnx.state(whole, nnx.Param))
        assert error(jax.jit(split)(*values), name) < TOLERANCE


def test_heads_that_do_not_divide_among_devices():
    with on_mesh(make_mesh(MeshConfig(tp=8))), pytest.raises(ConfigError, match="4 heads"):
        MoonViT(declared("kimi_k25").config, dtype=jnp.float32)


def test_published_sizes():
    scout = Llama4VisionConfig(
        image_size=336,
        patch_size=14,
        hidden_size=1408,
        intermediate_size=5632,
        num_layers=34,
        num_heads=16,
        adapter_size=4096,
        text_hidden_size=5120,
    )
    tower = Llama4Vision(scout, dtype=jnp.bfloat16)
    pixels = jax.ShapeDtypeStruct((17, 3, 336, 336), jnp.float32)
    rows = traced(tower, lambda t, x: t(x), pixels)
    assert rows.shape == (17 * 144, 5120)
    assert 0.85e9 < sum(math.prod(spec.shape) for spec in param_specs(tower)) < 0.95e9
    k25 = MoonViT(MoonViTConfig(text_hidden_size=7168), dtype=jnp.bfloat16)
    patches = jax.ShapeDtypeStruct((90 * 128, 3, 14, 14), jnp.float32)
    rows = traced(k25, lambda t, x: t(x, [(1, 90, 128)]), patches)
    assert rows.shape == (45 * 64, 7168)
    assert 0.44e9 < sum(math.prod(spec.shape) for spec in param_specs(k25)) < 0.5e9


def traced(tower: nnx.Module, run: Any, pixels: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    graph, state = nnx.split(tower)
    treedef = jax.tree.structure(state)
    shapes = tuple(spec.value for spec in param_specs(tower))

    def forward(params: tuple, x: jax.Array) -> jax.Array:
        return run(nnx.merge(graph, jax.tree.unflatten(treedef, params)), x)

    return jax.eval_shape(forward, shapes, pixels)


def test_positions_are_kept_where_the_grid_is_the_table():
    taps, weights = cubic_taps(8, 8)
    np.testing.assert_array_equal(weights, np.tile([0, 1, 0, 0], (8, 1)))
    np.testing.assert_array_equal(taps[:, 1], np.arange(8))


@pytest.mark.parametrize(
    ("grid", "words"),
    [((1, 3, 4), "2 x 2"), ((1, 0, 4), "2 x 2"), ((3, 2, 2), "3 frames"), ((1, 20, 20), "400 patches")],
)
def test_grids_that_cannot_be(grid: Grid, words: str):
    with pytest.raises(ConfigError, match=words):
        make_layout(declared("kimi_k25").config, [grid], 128)
