"""The mixture of experts against a float64 forward that is written out token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxinfer.config.mesh import MeshConfig
from jaxinfer.config.model import MoEConfig
from jaxinfer.errors import ConfigError
from jaxinfer.models.layers.moe import Layout, MoE, sum_in_order
from jaxinfer.models.params import ParamSpec, keep_blocks, param_specs
from jaxinfer.parallel.collectives import on_mesh
from jaxinfer.parallel.mesh import make_mesh, partition
from jaxinfer.parallel.programs import jit_on
from pallas_kernels.linear import BlockKind, BlockWeights

Tensors = dict[str, np.ndarray]
QWEN = MoEConfig(layers=(0,), num_experts=8, top_k=3, hidden_size=48, normalize=True)
DEEPSEEK = MoEConfig(
    layers=(0,),
    num_experts=16,
    top_k=4,
    hidden_size=32,
    scoring="sigmoid",
    normalize=True,
    scale=2.5,
    score_bias=True,
    num_groups=4,
    top_groups=2,
    shared_hidden_size=48,
)
LLAMA = MoEConfig(
    layers=(0,),
    num_experts=4,
    top_k=1,
    hidden_size=64,
    scoring="topk_sigmoid",
    shared_hidden_size=64,
    weigh_inputs=True,
)


@dataclass
class Case:
    """A layer called "moe", and the checkpoint that it is filled from."""

    layer: MoE
    specs: list[ParamSpec]
    tensors: Tensors

    def fill(self, changed: Tensors | None = None) -> None:
        self.tensors |= changed or {}
        leaves = []
        for spec in self.specs:
            parts = [self.tensors[name] for name in spec.sources]
            parts = [part.swapaxes(-1, -2) if spec.transposed else part for part in parts]
            leaves.append(jnp.asarray(np.concatenate(parts).reshape(spec.shape), dtype_of(spec)))
        set_leaves(self.layer, leaves)


def make(
    config: MoEConfig, width: int, layout: Layout = "separate", dtype: Any = jnp.float32, seed: int = 0
) -> Case:
    layer = MoE("moe", config, width, act="silu", layout=layout, dtype=dtype)
    rng = np.random.default_rng(seed)
    case = Case(layer, param_specs(layer), {})
    for spec in case.specs:
        for name, shape in zip(spec.sources, spec.source_shapes, strict=True):
            values = rng.standard_normal(shape) * (0.3 if name.endswith("bias") else shape[-1] ** -0.5)
            case.tensors[name] = np.asarray(jnp.asarray(values, dtype_of(spec)))
    case.fill()
    return case


def dtype_of(spec: ParamSpec) -> Any:
    assert isinstance(spec.value, jax.ShapeDtypeStruct)
    return spec.value.dtype


def set_leaves(layer: MoE, leaves: list[Any]) -> None:
    state = nnx.state(layer, nnx.Param)
    structure = jax.tree.structure(state, is_leaf=lambda value: isinstance(value, BlockWeights))
    nnx.update(layer, jax.tree.unflatten(structure, leaves))


def compiled(layer: MoE) -> Callable[[jax.Array], np.ndarray]:
    graph, state = nnx.split(layer)
    program = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return lambda x: np.asarray(program(state, x))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def best(values: np.ndarray, count: int) -> tuple[list[int], float]:
    """Indices of the largest values, and how far the last of them is from the first that is left out."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    last = order[count:]
    return order[:count], values[order[count - 1]] - values[last[0]] if last else np.inf


def route(config: MoEConfig, logits: np.ndarray, bias: np.ndarray | float) -> tuple[dict[int, float], float]:
    """The weights of one token's experts, and how near it came to another choice."""
    c = config
    sigmoids = 1 / (1 + np.exp(-logits))
    scores = np.exp(logits) / np.exp(logits).sum() if c.scoring == "softmax" else sigmoids
    ranks = (logits if c.scoring == "topk_sigmoid" else scores) + bias
    margin = np.inf
    if c.num_groups > 1:
        groups = ranks.reshape(c.num_groups, -1)
        sums = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        kept, margin = best(sums, c.top_groups)
        outside = ~np.isin(np.arange(c.num_groups), kept)
        ranks = np.where(np.repeat(outside, groups.shape[1]), -np.inf, ranks)
    experts, other = best(ranks, c.top_k)
    total = scores[experts].sum() if c.normalize else 1.0
    return {e: c.scale * scores[e] / total for e in experts}, min(margin, other)


def forward(
    config: MoEConfig, tensors: Tensors, x: np.ndarray, layout: Layout = "separate"
) -> tuple[np.ndarray, float]:
    """The layer's results, and the least distance of a token from another choice of experts."""
    c = config
    t = {name.removeprefix("moe."): values.astype(np.float64) for name, values in tensors.items()}

    def network(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        return down @ (silu(gate @ x) * (up @ x))

    def expert(e: int) -> tuple[np.ndarray, ...]:
        if layout == "separate":
            gate, up, down = (t[f"experts.{e}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
            return gate, up, down
        gate, up = np.split(t["experts.gate_up_proj"][e], 2, axis=1)
        return gate.T, up.T, t["experts.down_proj"][e].T

    out, margin = np.zeros_like(x), np.inf
    for i, row in enumerate(x):
        logits = t["router.weight" if layout == "fused" else "gate.weight"] @ row
        weights, near = route(c, logits, t["gate.e_score_correction_bias"] if c.score_bias else 0.0)
        margin = min(margin, near)
        for e, w in weights.items():
            out[i] += network(w * row, *expert(e)) if c.weigh_inputs else w * network(row, *expert(e))
        if c.shared_hidden_size:
            name = "shared_expert" if layout == "fused" else "shared_experts"
            out[i] += network(row, *(t[f"{name}.{kind}_proj.weight"] for kind in ("gate", "up", "down")))
    return out, margin


@st.composite
def settings_of_a_mixture(draw: st.DrawFn) -> dict[str, Any]:
    groups, size = draw(st.sampled_from([(1, 1), (1, 5), (1, 16), (2, 8), (4, 2), (6, 3), (3, 1)]))
    top_groups = draw(st.integers(1, groups))
    return {
        "num_experts": groups * size,
        "top_k": draw(st.integers(1, min(6, top_groups * size))),
        "hidden_size": draw(st.sampled_from([16, 24, 32])),
        "scoring": draw(st.sampled_from(["softmax", "sigmoid", "topk_sigmoid"])),
        "normalize": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "score_bias": draw(st.booleans()),
        "num_groups": groups,
        "top_groups": top_groups,
        "shared_hidden_size": draw(st.sampled_from([0, 16, 40])),
        "weigh_inputs": draw(st.booleans()),
    }


@settings(max_examples=20)
@given(
    fields=settings_of_a_mixture(),
    tokens=st.sampled_from([1, 2, 3, 9, 40]),
    width=st.sampled_from([16, 20, 64]),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("layout", ["separate", "fused"])
def test_equals_the_written_out_forward(
    layout: Layout, fields: dict[str, Any], tokens: int, width: int, seed: int
):
    config = MoEConfig(layers=(0,), **fields)
    if layout == "fused":
        config = replace(config, score_bias=False)
    case = make(config, width, layout, seed=seed)
    x = np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)
    expected, margin = forward(config, case.tensors, x.astype(np.float64), layout)
    assume(margin > 1e-5)  # float32 may choose otherwise where two experts are this near
    np.testing.assert_allclose(compiled(case.layer)(jnp.asarray(x)), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_bfloat16(config: MoEConfig):
    """The router's scores are float32 whatever the weights are: it chooses as the float64 forward does."""
    case = make(config, 64, dtype=jnp.bfloat16)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((99, 64)), jnp.bfloat16)
    expected, margin = forward(config, case.tensors, np.asarray(x, np.float64))
    assert 1e-5 < margin < 2e-3  # bfloat16 scores would have chosen others
    result = case.layer(x)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, atol=0.03 * np.abs(expected).std())


def test_bias_chooses_but_does_not_weigh():
    config = replace(DEEPSEEK, num_groups=1, top_groups=1, normalize=False, scale=1.0, shared_hidden_size=0)
    case = make(config, 32)
    bias = np.full(16, -50.0, np.float32)
    bias[[2, 3, 5, 7]] = -40.0
    case.fill({"moe.gate.e_score_correction_bias": bias})
    x = np.random.default_rng(1).standard_normal((4, 32)).astype(np.float32)
    experts, weights = case.layer.route(jnp.asarray(x))
    assert all(set(row) == {2, 3, 5, 7} for row in experts.tolist())
    scores = 1 / (1 + np.exp(-(x @ case.tensors["moe.gate.weight"].T)))
    np.testing.assert_allclose(weights, np.take_along_axis(scores, np.asarray(experts), 1), rtol=1e-5)


def test_experts_outside_the_best_groups_are_not_chosen_even_when_scores_are_negative():
    """transformers masks them with minus infinity; zero would beat a negative biased score."""
    config = replace(DEEPSEEK, top_groups=1)
    case = make(config, 32)
    case.fill({"moe.gate.e_score_correction_bias": np.full(16, -5.0, np.float32)})
    experts, _ = case.layer.route(jnp.asarray(np.random.default_rng(2).standard_normal((9, 32)), jnp.float32))
    assert all(len({e // 4 for e in row}) == 1 for row in experts.tolist())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("config", "layout"),
    [(QWEN, "separate"), (DEEPSEEK, "separate"), (LLAMA, "fused")],
    ids=["qwen", "deepseek", "llama"],
)
def test_a_token_does_not_depend_on_its_company(config: MoEConfig, layout: Layout, dtype: str):
    """Bit for bit: alone, in batches of other sizes, at other places, and beside rows of NaN."""
    run = compiled(make(config, 64, layout, dtype=dtype).layer)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((70, 64)), dtype)
    whole = run(x)
    for count in (1, 2, 5, 16, 33):
        np.testing.assert_array_equal(run(x[:count]), whole[:count])
    turned = np.random.default_rng(4).permutation(70)
    np.testing.assert_array_equal(run(x[turned]), whole[turned])
    np.testing.assert_array_equal(run(x.at[40:].set(jnp.nan))[:40], whole[:40])


def test_experts_without_tokens_are_not_computed():
    case = make(QWEN, 32)
    x = jnp.asarray(np.random.default_rng(5).standard_normal((2, 32)), jnp.float32)
    used = set(case.layer.route(x)[0].reshape(-1).tolist())
    assert 3 <= len(used) < 8
    expected = case.layer(x)
    unused = [n for n in case.tensors if ".experts." in n and int(n.split(".")[2]) not in used]
    case.fill({name: np.full_like(case.tensors[name], np.nan) for name in unused})
    np.testing.assert_array_equal(case.layer(x), expected)


@pytest.mark.parametrize("kind", ["int4", "int4_symmetric", "int8"])
def test_experts_in_blocks(kind: BlockKind):
    """They stay in blocks where the checkpoint stores them so; the router, which it stores as numbers, does not."""
    config = replace(DEEPSEEK, hidden_size=64)
    layer = MoE("moe", config, 96, act="silu", dtype=jnp.float32)
    assert keep_blocks(layer, lambda name: kind if ".experts." in name else None) == 2
    rng = np.random.default_rng(6)

    def values(part: jax.ShapeDtypeStruct) -> jax.Array:
        if part.dtype == jnp.uint8 or part.dtype == jnp.int8:
            info = jnp.iinfo(part.dtype)
            return jnp.asarray(rng.integers(info.min, info.max, part.shape, part.dtype, endpoint=True))
        return jnp.asarray(rng.standard_normal(part.shape) * 0.02, part.dtype)

    leaves = [jax.tree.map(values, spec.value) for spec in param_specs(layer)]
    set_leaves(layer, leaves)
    plain = MoE("moe", config, 96, act="silu", dtype=jnp.float32)
    set_leaves(plain, [v.dense() if isinstance(v, BlockWeights) else v for v in leaves])
    x = jnp.asarray(rng.standard_normal((9, 96)), jnp.float32)
    expected = np.asarray(plain(x))
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(layer(x), expected, atol=1e-5 * np.abs(expected).max())


def test_transposed_experts_do_not_stay_in_blocks():
    layer = MoE("moe", LLAMA, 64, act="silu", layout="fused", dtype=jnp.float32)
    assert keep_blocks(layer, lambda name: "int8") == 3  # the router and the shared expert


def test_names_of_the_tensors():
    separate = make(replace(DEEPSEEK, num_experts=4, num_groups=1, top_groups=1), 16)
    kinds = ("gate_proj", "up_proj", "down_proj")
    assert separate.tensors.keys() == {
        "moe.gate.weight",
        "moe.gate.e_score_correction_bias",
        *(f"moe.experts.{e}.{kind}.weight" for e in range(4) for kind in kinds),
        *(f"moe.shared_experts.{kind}.weight" for kind in kinds),
    }
    fused = make(LLAMA, 16, "fused")
    shapes = {name: values.shape for name, values in fused.tensors.items()}
    assert shapes == {
        "moe.router.weight": (4, 16),
        "moe.experts.gate_up_proj": (4, 16, 128),
        "moe.experts.down_proj": (4, 64, 16),
        "moe.shared_expert.gate_proj.weight": (64, 16),
        "moe.shared_expert.up_proj.weight": (64, 16),
        "moe.shared_expert.down_proj.weight": (16, 64),
    }


@pytest.mark.parametrize(("ep", "tp"), [(1, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("config", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_split_among_devices(config: MoEConfig, ep: int, tp: int):
    """Each device has its share of the experts, and of each expert's hidden width."""
    case = make(config, 64)
    x = jnp.asarray(np.random.default_rng(7).standard_normal((13, 64)), jnp.float32)
    expected = case.layer(x)
    mesh = make_mesh(MeshConfig(ep=ep, tp=tp))
    with on_mesh(mesh):
        graph, state = nnx.split(MoE("moe", config, 64, act="silu", dtype=jnp.float32))
    leaves = jax.tree.leaves(nnx.state(case.layer, nnx.Param))
    specs = [partition(spec.axes, str(spec.path)) for spec in case.specs]
    structure = jax.tree.structure(state)

    def apply(leaves: list[jax.Array], x: jax.Array) -> jax.Array:
        return nnx.merge(graph, jax.tree.unflatten(structure, leaves))(x)

    run = jit_on(mesh, apply, (specs, PartitionSpec()), PartitionSpec())
    np.testing.assert_allclose(run(leaves, x), expected, atol=1e-5)


@given(st.integers(1, 20))
@settings(max_examples=20)
def test_sum_in_order(count: int):
    x = np.random.default_rng(count).integers(-9, 9, (3, count)).astype(np.float32)
    np.testing.assert_array_equal(sum_in_order(jnp.asarray(x)), x.sum(axis=-1, keepdims=True))


def test_unknown_activation_is_refused():
    with pytest.raises(ConfigError, match="hidden_act 'softplus' is not supported"):
        MoE("moe", QWEN, 16, act="softplus", dtype=jnp.float32)
