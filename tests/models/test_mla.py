"""Multi-head latent attention against the paper's formulas (arXiv:2405.04434, section 2.1) in float64."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxinfer.config.mesh import MeshConfig
from jaxinfer.config.model import ModelConfig
from jaxinfer.kv.cache import StepBatch
from jaxinfer.kv.pages import LayerPlace, PageGroup
from jaxinfer.models.decoder import Step
from jaxinfer.models.deepseek import config_from_hf
from jaxinfer.models.layers.mla import MLA
from jaxinfer.models.layers.rope import inverse_frequencies, rope_tables
from jaxinfer.models.params import param_specs
from jaxinfer.parallel.collectives import on_mesh
from jaxinfer.parallel.mesh import make_mesh, partition
from jaxinfer.parallel.programs import jit_on

PLACE = LayerPlace(group=1, array=0, look=PageGroup())
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full queries": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "full queries, biases": {"q_lora_rank": None, "attention_bias": True},
    "halves": {"rope_interleave": False},
    "yarn": {"rope_scaling": YARN, "max_position_embeddings": 128},
    "yarn without mscale": {"rope_scaling": {k: v for k, v in YARN.items() if "mscale" not in k}},
    "odd widths": {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "v_head_dim": 10, "q_lora_rank": 20},
    "ranks of one width": {"q_lora_rank": 40},
    "more values than keys": {"v_head_dim": 48, "num_attention_heads": 6},
}


def config_of(**changes: Any) -> ModelConfig:
    return config_from_hf(
        {
            "vocab_size": 8,
            "hidden_size": 48,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "rope_theta": 100.0,
            "rms_norm_eps": 0.1,  # the layer's own norms do not take it
            **changes,
        }
    )


class Case:
    """A layer called "attn" and its checkpoint, sequences of hidden states, and the pages that they share.

    What nothing may read is NaN: unused pages, and the hidden states of padding.
    """

    def __init__(
        self, config: ModelConfig, lengths: list[int], *, page: int, block: int, dtype: Any = jnp.float32
    ):
        rng = np.random.default_rng(0)
        assert config.mla is not None
        self.config, self.mla, self.page, self.block = config, config.mla, page, block
        layer = MLA("attn", config, PLACE, dtype=dtype)
        self.tensors: dict[str, np.ndarray] = {}
        leaves = []
        self.specs = param_specs(layer)
        for spec in self.specs:
            for name, shape in zip(spec.sources, spec.source_shapes, strict=True):
                values = rng.standard_normal(shape) * (1.0 if len(shape) == 1 else shape[-1] ** -0.5)
                self.tensors[name] = np.asarray(jnp.asarray(values, dtype))
            parts = [self.tensors[name] for name in spec.sources]
            leaves.append(jnp.asarray(np.concatenate(parts).reshape(spec.shape)))
        self.leaves = leaves
        self.graph, state = nnx.split(layer)
        self.structure = jax.tree.structure(state)
        self.x = [
            np.asarray(jnp.asarray(rng.standard_normal((n, config.hidden_size)), dtype)) for n in lengths
        ]
        self.outputs = [np.full(x.shape, np.nan) for x in self.x]
        self.done = [0] * len(lengths)
        width = -(-max(lengths) // page)
        count = len(lengths) * width
        order = rng.permutation(count).reshape(len(lengths), width) + 1
        self.tables = np.stack([np.zeros_like(order), order]).astype(np.int32)
        latent = self.mla.latent_dim
        self.pages = jnp.full((1, 1, count + 1, page, latent), jnp.nan, dtype)
        self.programs: dict[tuple[int, int], Any] = {}

    def apply(
        self, leaves: list[jax.Array], x: jax.Array, batch: StepBatch, pages: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        layer = nnx.merge(self.graph, jax.tree.unflatten(self.structure, leaves))
        inv_freq = inverse_frequencies(self.config.rope, self.mla.rope_dim)
        return layer(x, Step(batch, {"global": rope_tables(batch.positions, *inv_freq)}), pages)

    def step(self, decode: list[int], prefill: list[tuple[int, int]]) -> None:
        """One token of each sequence in `decode`, then a block for each (sequence, tokens) in `prefill`."""
        rows = len(decode) + 1 if decode else 0  # one row of padding, whose table is another sequence's
        spans: list[tuple[int, int, int]] = []  # sequence, first flat token, tokens
        spans += [(s, i, 1) for i, s in enumerate(decode)]
        spans += [(s, rows + i * self.block, n) for i, (s, n) in enumerate(prefill)]
        total = rows + len(prefill) * self.block
        x = np.full((total, self.config.hidden_size), np.nan)
        positions = np.zeros(total, np.int32)
        outputs: list[np.ndarray] = []
        for s, first, count in spans:
            start = self.done[s]
            outputs.append(self.outputs[s][start : start + count])
            x[first : first + count] = self.x[s][start : start + count]
            positions[first : first + (self.block if first >= rows else 1)] = start
            positions[first : first + count] += np.arange(count, dtype=np.int32)
            self.done[s] += count
        owners = decode + [0] * (rows - len(decode)) + [s for s, _ in prefill]
        lens = np.array([self.done[s] for s in owners], np.int32)
        lens[len(decode) : rows] = 0
        batch = StepBatch(
            positions=jnp.asarray(positions),
            tables=jnp.asarray(self.tables[:, owners]),
            kv_lens=jnp.asarray(lens),
            num_decode=rows,
            block=self.block,
        )
        program = self.programs.setdefault((rows, len(prefill)), jax.jit(self.apply))
        y, self.pages = program(self.leaves, jnp.asarray(x, self.pages.dtype), batch, self.pages)
        for output, (_, first, count) in zip(outputs, spans, strict=True):
            output[:] = np.asarray(y)[first : first + count]

    def check(self, atol: float) -> None:
        for x, output in zip(self.x, self.outputs, strict=True):
            np.testing.assert_allclose(output, self.expected(x), atol=atol)

    def expected(self, x: np.ndarray) -> np.ndarray:
        """The layer's output for a whole sequence."""
        c, m = self.config, self.mla
        t = {name.removeprefix("attn."): values.astype(np.float64) for name, values in self.tensors.items()}
        x = x.astype(np.float64)

        def project(name: str, x: np.ndarray) -> np.ndarray:
            return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)

        def norm(name: str, x: np.ndarray) -> np.ndarray:
            return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * t[f"{name}.weight"]

        inv_freq, factor = inverse_frequencies(c.rope, m.rope_dim)
        turns = factor * np.exp(1j * np.arange(len(x))[:, None] * inv_freq.astype(np.float64))

        def rotate(x: np.ndarray, turns: np.ndarray) -> np.ndarray:
            if c.rope.interleaved:
                pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turns
                return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)
            half = x.shape[-1] // 2
            pairs = (x[..., :half] + 1j * x[..., half:]) * turns
            return np.concatenate([pairs.real, pairs.imag], axis=-1)

        if m.q_rank is None:
            q = project("q_proj", x)
        else:
            q = project("q_b_proj", norm("q_a_layernorm", project("q_a_proj", x)))
        q = q.reshape(len(x), c.num_heads, m.nope_dim + m.rope_dim)
        latent, key = np.split(project("kv_a_proj_with_mqa", x), [m.kv_rank], axis=1)
        kv = project("kv_b_proj", norm("kv_a_layernorm", latent)).reshape(len(x), c.num_heads, -1)
        key = rotate(key, turns)
        scale = (m.nope_dim + m.rope_dim) ** -0.5
        if c.rope.mscale_all_dim:
            scale *= (0.1 * c.rope.mscale_all_dim * math.log(c.rope.factor) + 1) ** 2
        mixed = np.zeros((len(x), c.num_heads, m.value_dim))
        for h in range(c.num_heads):
            queries = np.concatenate([q[:, h, : m.nope_dim], rotate(q[:, h, m.nope_dim :], turns)], axis=1)
            keys = np.concatenate([kv[:, h, : m.nope_dim], key], axis=1)
            scores = np.where(np.tri(len(x), dtype=bool), queries @ keys.T * scale, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, h] = weights @ kv[:, h, m.nope_dim :] / weights.sum(axis=1, keepdims=True)
        return project("o_proj", mixed.reshape(len(x), -1))


@pytest.mark.parametrize("name", SETTINGS)
def test_one_prefill(name: str):
    """In blocks long enough for keys and values to be made from the latents."""
    case = Case(config_of(**SETTINGS[name]), [40, 1, 64], page=16, block=64)
    case.step([], [(0, 40), (1, 1), (2, 64)])
    case.check(1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_chunks_then_decode_beside_other_prefills(name: str):
    case = Case(config_of(**SETTINGS[name]), [13, 21, 6], page=4, block=8)
    case.step([], [(0, 8)])
    case.step([], [(0, 3), (1, 8)])
    case.step([0], [(1, 8)])
    case.step([0], [(2, 3)])
    for _ in range(3):
        case.step([1, 2], [])
    case.step([1], [])
    case.step([1], [])
    case.check(1e-5)


@pytest.mark.parametrize("page", [1, 5, 16])
def test_page_sizes(page: int):
    case = Case(config_of(), [3 * page + 2, page], page=page, block=2 * page)
    case.step([], [(0, 2 * page), (1, page)])
    case.step([], [(0, page)])
    case.step([0], [])
    case.step([0], [])
    case.check(1e-5)


def test_two_blocks_of_one_sequence_in_a_step():
    case = Case(config_of(), [14], page=4, block=8)
    case.step([], [(0, 8), (0, 6)])
    case.check(1e-5)


def test_bfloat16():
    """Weights, hidden states and latents keep 8 bits; the sums do not add to that error."""
    case = Case(config_of(), [40], page=8, block=32, dtype=jnp.bfloat16)
    case.step([], [(0, 32)])
    for _ in range(8):
        case.step([0], [])
    assert case.pages.dtype == jnp.bfloat16
    case.check(0.04 * float(np.std(case.expected(case.x[0]))))


def test_latents_are_what_the_cache_holds():
    """The normalised latent, then the rotated key, in the pages that the table of the layer's group names."""
    case = Case(config_of(), [6], page=4, block=8)
    case.step([], [(0, 6)])
    t = {name: values.astype(np.float64) for name, values in case.tensors.items()}
    rows = case.x[0].astype(np.float64) @ t["attn.kv_a_proj_with_mqa.weight"].T
    latent = rows[:, :32] / np.sqrt((rows[:, :32] ** 2).mean(axis=1, keepdims=True) + 1e-6)
    held = np.asarray(case.pages)[0, 0, case.tables[1, 0]].reshape(-1, 40)[:6]
    np.testing.assert_allclose(held[:, :32], latent * t["attn.kv_a_layernorm.weight"], atol=1e-5)
    np.testing.assert_allclose(held[0, 32:], rows[0, 32:], atol=1e-5)  # position 0 is not turned
    np.testing.assert_allclose(
        np.linalg.norm(held[:, 32:], axis=1), np.linalg.norm(rows[:, 32:], axis=1), rtol=1e-5
    )


def test_names_of_the_tensors():
    shapes = {name: values.shape for name, values in Case(config_of(attention_bias=True), [1], page=1, block=1).tensors.items()}  # fmt: skip
    expected = {
        "attn.q_a_proj.weight": (24, 48),
        "attn.q_a_proj.bias": (24,),
        "attn.q_a_layernorm.weight": (24,),
        "attn.q_b_proj.weight": (4 * 24, 24),
        "attn.kv_a_proj_with_mqa.weight": (40, 48),
        "attn.kv_a_proj_with_mqa.bias": (40,),
        "attn.kv_a_layernorm.weight": (32,),
        "attn.kv_b_proj.weight": (4 * 32, 32),
        "attn.o_proj.weight": (48, 4 * 16),
        "attn.o_proj.bias": (48,),
    }
    assert shapes == expected
    full = Case(config_of(q_lora_rank=None, attention_bias=True), [1], page=1, block=1).tensors
    assert full.keys() == {name for name in expected if ".q_" not in name} | {"attn.q_proj.weight"}


@pytest.mark.parametrize("q_rank", [24, None])
def test_split_among_devices(q_rank: int | None):
    """Each device has its share of the heads, and all latents."""
    case = Case(config_of(q_lora_rank=q_rank, attention_bias=True), [12, 5], page=4, block=8)
    case.step([], [(0, 8), (1, 4)])
    mesh = make_mesh(MeshConfig(tp=2))
    with on_mesh(mesh):
        case.graph, _ = nnx.split(MLA("attn", case.config, PLACE, dtype=jnp.float32))
    specs = [partition(spec.axes, str(spec.path)) for spec in case.specs]
    everywhere = PartitionSpec()
    program = jit_on(mesh, case.apply, (specs, everywhere, everywhere, everywhere), everywhere)
    case.programs = {(2, 1): program}
    case.step([1], [(0, 4)])
    for output, done, x in zip(case.outputs, case.done, case.x, strict=True):
        np.testing.assert_allclose(output[:done], case.expected(x)[:done], atol=1e-5)
