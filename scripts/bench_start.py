#!/usr/bin/env python
"""From the start of a process to its first token, and where the time goes: first start, later starts, and transformers. Prints JSON.

A first start has an empty cache (nothing compiled, the C++ kernels not built); a later one finds what the first one left. Peers need
`scripts/bench_peers`; their time is from the start of the process to the first token too. Medians over rounds, taken in turns.

    python scripts/bench_start.py [--model smollm2-135m] [--rounds 3] [--no-peers]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxinfer.weights import presets

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
OURS = """
import json, sys, time
begin = time.time()
from jaxinfer import LLM, SamplingParams
imported = time.time()
llm = LLM(sys.argv[1])
loaded = time.time()
llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=1, temperature=0))
end = time.time()
print(json.dumps({"begin": begin, "end": end, "import": imported - begin, **llm.start_seconds, "first request": end - loaded}))
"""
TRANSFORMERS = """
import json, os, sys, time
begin = time.time()
import torch
from transformers import AutoModelForCausalLM
imported = time.time()
model = AutoModelForCausalLM.from_pretrained(
    os.path.dirname(sys.argv[1]), gguf_file=os.path.basename(sys.argv[1]), dtype=torch.float32
).eval()
loaded = time.time()
model.generate(torch.tensor([[1, 2, 3, 4, 5]]), max_new_tokens=1, do_sample=False, pad_token_id=0)
end = time.time()
print(json.dumps({"begin": begin, "end": end, "import": imported - begin, "load": loaded - imported, "first request": end - loaded}))
"""


def start(python: str, program: str, model: Path, cache: str | None = None) -> dict[str, float]:
    """Seconds by phase; "total" is from before the process to its first token, "python" what the interpreter needs to begin."""
    env = dict(os.environ) if cache is None else {**os.environ, "JAXINFER_CACHE": cache}
    before = time.time()
    done = subprocess.run(
        [python, "-c", program, str(model)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    phases = json.loads(done.stdout.splitlines()[-1])
    begin, end = phases.pop("begin"), phases.pop("end")
    return {"total": end - before, "python": begin - before, **phases}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {phase: round(statistics.median(run[phase] for run in runs), 2) for phase in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time from process start to first token.")
    parser.add_argument("--model", default="smollm2-135m", help="a preset or a .gguf file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()
    model = presets.resolve(args.model) if presets.is_preset(args.model) else Path(args.model)
    with tempfile.TemporaryDirectory() as cache:
        report = {"first start": [start(sys.executable, OURS, model, cache)], "later start": []}
        peers = [] if args.no_peers else [os.environ.get("PEERS", str(PEERS))]
        for _ in range(args.rounds):
            report["later start"].append(start(sys.executable, OURS, model, cache))
            for python in peers:
                report.setdefault("transformers float32", []).append(start(python, TRANSFORMERS, model))
    print(json.dumps({"unit": "seconds", **{name: medians(runs) for name, runs in report.items()}}))


if __name__ == "__main__":
    main()
