#!/usr/bin/env python
"""Compares the engine with its peers on one machine in one run, and prints JSON.

All workers stay loaded; each workload runs on one after the other, round after round, so that a drifting machine drifts for all.
A figure is the median over rounds; a ratio is the median of the rounds' ratios. Peers need `scripts/bench_peers`. A worker is a
program and what it does with the weights: a dtype they are spread out into, or "packed" for the blocks of the file.

    python scripts/bench_engine.py [--rounds 5] [--workers ours-bfloat16,transformers-bfloat16,...] [--workloads decode-1,...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxinfer.weights import presets

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
WORKERS = (
    "ours-packed",
    "ours-bfloat16",
    "ours-float32",
    "transformers-bfloat16",
    "transformers-float32",
    "llamacpp-bfloat16",
    "llamacpp-packed",
)
WORKLOADS = ("decode-1", "decode-8", "decode-32", "prefill", "mixed")


class Worker:
    """A worker process and its figures, {workload: tokens/s by round}."""

    def __init__(self, name: str, model: Path, bf16_model: Path):
        self.name = name
        kind, dtype = name.split("-")
        script = {"ours": "ours.py", "transformers": "transformers_peer.py", "llamacpp": "llamacpp_peer.py"}[
            kind
        ]
        python = sys.executable if kind == "ours" else os.environ.get("PEERS", str(PEERS))
        path = bf16_model if name == "llamacpp-bfloat16" else model
        command = [python, str(ROOT / "scripts" / "bench" / script), str(path), dtype]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.load_s: float = self._answer()["load_s"]
        self.figures: dict[str, list[float]] = {}

    def run(self, workload: str, round_: int, *, count: bool) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"workload": workload, "round": round_}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if count and "tokens_per_s" in answer:
            self.figures.setdefault(workload, []).append(answer["tokens_per_s"])

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"error: worker {self.name} ended: see its message above")
        return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compares the engine with its peers on one machine in one run."
    )
    parser.add_argument("--model", default="smollm2-135m", help="a preset or a .gguf file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", default=",".join(WORKERS))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    args = parser.parse_args()
    model = presets.resolve(args.model) if presets.is_preset(args.model) else Path(args.model)
    names = args.workers.split(",")
    with tempfile.TemporaryDirectory() as folder:
        bf16_model = Path(folder) / "bf16.gguf"
        if "llamacpp-bfloat16" in names:
            subprocess.run(
                [sys.executable, str(ROOT / "scripts/bench/to_bf16.py"), str(model), str(bf16_model)],
                check=True,
            )
        workers = [Worker(name, model, bf16_model) for name in names]
        for workload in args.workloads.split(","):
            for round_ in range(-1, args.rounds):  # the first is a warm-up
                for worker in workers:
                    worker.run(workload, round_, count=round_ >= 0)
            print(f"{workload}: {summary(workers, workload)}", file=sys.stderr)
        for worker in workers:
            worker.close()
    print(json.dumps(report(workers, args.workloads.split(","))))


def summary(workers: list[Worker], workload: str) -> dict[str, float]:
    return {
        w.name: round(statistics.median(w.figures[workload]), 1) for w in workers if workload in w.figures
    }


def report(workers: list[Worker], workloads: list[str]) -> dict[str, Any]:
    """Medians, and each of ours over each peer as the median of per-round ratios."""
    ratios: dict[str, dict[str, float]] = {}
    for ours in (w for w in workers if w.name.startswith("ours")):
        for peer in (w for w in workers if not w.name.startswith("ours")):
            both = {
                workload: zip(ours.figures[workload], peer.figures[workload], strict=True)
                for workload in workloads
                if workload in ours.figures and workload in peer.figures
            }
            ratios[f"{ours.name} / {peer.name}"] = {
                workload: round(statistics.median(a / b for a, b in pairs), 2)
                for workload, pairs in both.items()
            }
    return {
        "unit": "tokens/s, median",
        "load_s": {w.name: round(w.load_s, 2) for w in workers},
        "tokens_per_s": {workload: summary(workers, workload) for workload in workloads},
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
