"""`jaxinfer bench` through a real process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY = ("--model", "tiny-llama", "--max-num-seqs", "4", "--max-model-len", "128")


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxinfer.bench", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_everything_is_counted():
    done = bench(
        *TINY, "--num-prompts", "12", "--input-len", "20", "--output-len", "8", "--request-rate", "200"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["requests"] == 12
    assert result["prompt_tokens"] == 12 * 20
    assert result["generated_tokens"] == 12 * 8
    assert result["generated_tokens_per_s"] == pytest.approx(12 * 8 / result["seconds"], rel=0.01)
    for latency in (result["ttft_ms"], result["itl_ms"]):
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"]
    assert result["ttft_ms"]["p99"] < result["seconds"] * 1e3


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--range-ratio", "1"], "--range-ratio must be in [0, 1)"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--modle", "m"], "did you mean --model"),
    ],
)
def test_wrong_usage_is_one_line(args: list[str], says: str):
    done = bench("--model", "tiny-llama", *args)
    assert done.returncode != 0
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
