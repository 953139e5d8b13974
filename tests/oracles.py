"""The recorded oracles in tests/oracles, opened."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

DIRECTORY = Path(__file__).parent / "oracles"


@dataclass(frozen=True)
class Oracle:
    """A tiny checkpoint and what transformers computes on it: see tests/oracles/README.md."""

    path: Path
    tokens: np.ndarray  # [B, S]
    logits: np.ndarray  # [B, S, V]
    prompts: list[list[int]]
    greedy: list[list[int]]


def load_oracle(name: str) -> Oracle:
    expected = load_file(DIRECTORY / name / "expected.safetensors")
    length = int(expected["prompt_len"][0])
    return Oracle(
        path=DIRECTORY / name,
        tokens=expected["tokens"],
        logits=expected["logits"],
        prompts=expected["tokens"][:, :length].tolist(),
        greedy=expected["greedy"].tolist(),
    )


def smollm2_cases() -> list[dict[str, Any]]:
    return json.loads((DIRECTORY / "smollm2_135m.json").read_text())["cases"]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    peak = logits.max()
    return logits - peak - np.log(np.exp(logits - peak).sum())
