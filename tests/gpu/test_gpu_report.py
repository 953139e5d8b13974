"""scripts/gpu_report.py: our own programs go through XLA's whole GPU pipeline, and need what the arithmetic says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.network

ROOT = Path(__file__).parents[2]


def gpu_report(python: str, *args: str) -> dict[str, Any]:
    done = run(python, *args, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def run(python: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [python, "scripts/gpu_report.py", *args]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def model(tmp_path: Path, name: str, **changes: Any) -> str:
    config = json.loads((ROOT / "tests" / "oracles" / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return str(tmp_path)


def test_tensor_parallel_llama(gpu_python: str, tmp_path: Path):
    """Weights and cache by the numbers of its config; two sums a layer and the embedding's; and no copy of the cache."""
    sizes = ["--batch", "16", "--context", "1024", "--prefill", "128", "--page-size", "32"]
    found = gpu_report(
        gpu_python,
        "--topology",
        "2xh100",
        "--model",
        model(tmp_path, "llama3", vocab_size=4096),
        "--tp",
        "2",
        *sizes,
    )
    config = json.loads((tmp_path / "config.json").read_text())
    layers, width, heads, vocab = (
        config[x] for x in ("num_hidden_layers", "hidden_size", "num_key_value_heads", "vocab_size")
    )
    hd = config.get("head_dim") or width // config["num_attention_heads"]
    split = (
        layers * (2 * width * width + 2 * width * heads * hd + 3 * width * config["intermediate_size"])
        + 2 * vocab * width
    )
    (stage,) = found["stages"]
    assert stage["weights_bytes"] == 2 * (split // 2 + (2 * layers + 1) * width)
    kv = layers * 2 * (heads // 2) * hd * (16 * 1024 + 32) * 2
    assert stage["kv_bytes"] == kv
    decode, prefill, *samples = stage["programs"]
    for program, tokens in ((decode, 16), (prefill, 128)):
        assert program["temp_bytes"] < kv / 4
        assert program["alias_bytes"] == kv
        exchanges = program["collectives"]
        assert {(x["kind"], x["axes"]) for x in exchanges} == {("all-reduce", "tensor")}
        assert {x["shape"].partition("[")[2] for x in exchanges} == {f"{tokens},{width}]"}
        assert sum(x["count"] for x in exchanges) == 2 * layers + 1
    for program in samples:  # candidates travel, not logits
        assert max(x["num_bytes"] for x in program["collectives"]) < 16 * vocab


def test_packed_experts_over_devices(gpu_python: str, tmp_path: Path):
    """INT4 experts stay packed, a device holds its own alone, and one sum a mixture brings their results together."""
    sizes = ["--batch", "8", "--context", "128", "--prefill", "32", "--page-size", "32"]
    path = model(tmp_path, "kimi_k25_int4")
    found = gpu_report(gpu_python, "--topology", "4xh200", "--model", path, "--ep", "4", *sizes)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    mixtures = text["num_hidden_layers"] - text["first_k_dense_replace"]
    each = 3 * text["hidden_size"] * text["moe_intermediate_size"]
    experts = mixtures * text["n_routed_experts"] * each
    biases = mixtures * text["n_routed_experts"]  # these are float32, all else is bfloat16
    rest = 2 * (found["parameters"] - experts) + 2 * biases
    (stage,) = found["stages"]
    assert stage["weights_bytes"] == rest + experts * 9 // 16 // 4  # 4.5 bits a weight
    exchanges = stage["programs"][0]["collectives"]
    assert [(x["kind"], x["axes"], x["count"]) for x in exchanges] == [("all-reduce", "expert", mixtures)]
    assert stage["programs"][2]["collectives"] == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--topology", "2xh100", "--tp", "4"), "tp=4 needs 4 devices, there are 2 (NVIDIA H100"),
        (("--topology", "2xh100", "--tp", "2", "--page-size", "0"), "page_size must be at least 1, got 0"),
    ],
)
def test_errors_are_one_line(gpu_python: str, args: tuple[str, ...], says: str):
    done = run(gpu_python, "--model", "tests/oracles/llama3", *args)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("error: ")
