"""What no recorded oracle holds: biases, odd head widths, sliding windows, against a forward pass written out in float64 NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.models.params import param_specs
from jaxinfer.models.registry import family_for

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
}


def forward(w: dict[str, np.ndarray], c: dict[str, Any], tokens: list[int]) -> np.ndarray:
    """Logits [T, V], one head at a time."""
    heads, kv_heads, hd = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    window = c.get("sliding_window") or len(tokens)
    x = w["model.embed_tokens.weight"][tokens].astype(np.float64)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * w[f"{name}.weight"]

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T.astype(np.float64) + w.get(f"{name}.bias", 0.0)

    def rotate(x: np.ndarray) -> np.ndarray:
        phase = np.arange(len(x))[:, None] / c["rope_theta"] ** (np.arange(0, hd, 2) / hd)
        turned = (x[:, : hd // 2] + 1j * x[:, hd // 2 :]) * np.exp(1j * phase)
        return np.concatenate([turned.real, turned.imag], axis=1)

    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        h = norm(x, f"{p}.input_layernorm")
        q, k, v = (project(h, f"{p}.self_attn.{n}_proj") for n in "qkv")
        mixed = np.zeros((len(x), heads * hd))
        for head in range(heads):
            own, shared = slice(head * hd, (head + 1) * hd), head // (heads // kv_heads)
            theirs = slice(shared * hd, (shared + 1) * hd)
            scores = rotate(q[:, own]) @ rotate(k[:, theirs]).T / np.sqrt(hd)
            age = np.arange(len(x))[:, None] - np.arange(len(x))
            scores = np.where((age >= 0) & (age < window), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, own] = weights / weights.sum(-1, keepdims=True) @ v[:, theirs]
        x = x + project(mixed, f"{p}.self_attn.o_proj")
        h = norm(x, f"{p}.post_attention_layernorm")
        gate = project(h, f"{p}.mlp.gate_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * project(h, f"{p}.mlp.up_proj"), f"{p}.mlp.down_proj")
    head_name = "model.embed_tokens" if c.get("tie_word_embeddings") else "lm_head"
    return norm(x, "model.norm") @ w[f"{head_name}.weight"].T.astype(np.float64)


@pytest.fixture
def make(tmp_path: Path):
    """Writes a checkpoint of random weights, biases included, and returns them."""

    def write(config: dict[str, Any]) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        family = family_for(config)
        specs = param_specs(family.model(family.config_from_hf(config), dtype=np.float32))
        weights = {
            name: (rng.standard_normal(shape) * 0.3 + spec.path[-2].endswith("norm")).astype(np.float32)
            for spec in specs
            for name, shape in zip(spec.sources, spec.source_shapes, strict=True)
        }
        save_file(weights, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        return weights

    return write


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "attention biases": {"attention_bias": True},
    "mlp biases": {"mlp_bias": True},
    "one kv head": {"num_key_value_heads": 1},
    "head width not width / heads": {"head_dim": 24},
    "narrow": {"hidden_size": 24, "head_dim": 8, "intermediate_size": 20},
    "window": {"model_type": "mistral", "sliding_window": 9},
    "window of one": {"model_type": "mistral", "sliding_window": 1},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_engine(name: str, make, tmp_path: Path):
    config = {**BASE, **VARIANTS[name]}
    weights = make(config)
    tokens = np.random.default_rng(1).integers(0, config["vocab_size"], 40).tolist()
    expected = forward(weights, config, tokens)
    llm = LLM(
        tmp_path,
        dtype="float32",
        warm_up=False,
        max_num_seqs=2,
        page_size=4,
        prefill_block=8,
        max_prefill_tokens=16,
    )
    assert np.abs(llm.logits(tokens) - expected).max() < 2e-4 * expected.std()
    greedy = list(tokens)
    for _ in range(12):
        greedy.append(int(forward(weights, config, greedy)[-1].argmax()))
    for _ in ("cold", "warm"):
        [out] = llm.generate([tokens], SamplingParams(max_tokens=12, temperature=0))
        assert out.outputs[0].token_ids == greedy[40:]
    assert out.cached_tokens == 36
