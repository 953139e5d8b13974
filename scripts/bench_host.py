#!/usr/bin/env python
"""What the host does for each step and token, with a model so small that the device is not the limit. Prints JSON.

The time of a step is split by wrapping the engine's parts; waiting for the device is measured apart and left out. `policy_us` is
scheduling, building and reading together, what is left is the two calls that start programs. `cpu_us_per_token` is
the loop thread's own CPU time, which XLA's dispatch is part of.

    JAX_PLATFORMS=cpu python scripts/bench_host.py [--sequences 1,8,32,64,128,200,256] [--tokens 64]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax

from jaxinfer import LLM, SamplingParams


class Clock:
    """Wall seconds spent in wrapped functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner: Callable = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        setattr(owner, method, timed)


def measure(llm: LLM, sequences: int, tokens: int) -> dict[str, float]:
    """Figures of `sequences` requests of 16 prompt tokens decoding together, prefill left out."""
    engine = llm.engine
    for i in range(sequences):
        prompt = [3 + (i * 7 + j) % 500 for j in range(16)]
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    clock = Clock()
    parts = [
        (engine.scheduler, "schedule"),
        (engine._builder, "build"),
        (engine._runner, "dispatch"),
        (engine, "_read"),
    ]
    for owner, method in parts:
        clock.wrap(owner, method, method.strip("_"))
    read = engine._read

    def read_when_ready(flights: Any) -> Any:
        start = time.perf_counter()
        jax.block_until_ready([part.step.tokens for part in flights])
        clock.seconds["wait"] += time.perf_counter() - start
        return read(flights)

    engine._read = read_when_ready
    programs = engine._runner.stages[0].programs

    def when_idle(find: Callable) -> Callable:
        """XLA's CPU client starts a program only when the one before has ended, and lets the caller wait for it."""

        def found(*key: Any) -> Callable:
            program = find(*key)

            def call(*args: Any) -> Any:
                start = time.perf_counter()
                jax.block_until_ready(args)
                waited = time.perf_counter() - start
                clock.seconds["wait"] += waited
                clock.seconds["dispatch"] -= waited
                return program(*args)

            return call

        return found

    programs.forward, programs.sample = when_idle(programs.forward), when_idle(programs.sample)
    steps, generated = engine.num_steps, sum(len(s.tokens) for s in engine.scheduler.decoding)
    running = list(engine.scheduler.decoding)
    gc.collect()
    wall, cpu = time.perf_counter(), time.thread_time()
    while engine.has_unfinished_requests():
        engine.step()
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    for owner, method in parts:
        delattr(owner, method)
    del programs.forward, programs.sample
    steps = engine.num_steps - steps
    generated = sum(len(s.tokens) for s in running) - generated
    waited = clock.seconds.pop("wait")
    clock.seconds["policy"] = sum(clock.seconds[part] for part in ("schedule", "build", "read"))
    figures = {f"{name}_us": seconds / steps * 1e6 for name, seconds in clock.seconds.items()}
    host = (wall - waited) / steps * 1e6
    return {
        "sequences": sequences,
        "host_us_per_step": round(host, 1),
        "allowed_us_per_step": 200 + 10 * sequences,
        "cpu_us_per_token": round(cpu / generated * 1e6, 2),
        **{name: round(value, 1) for name, value in figures.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the host does for each step and token.")
    parser.add_argument("--sequences", default="1,8,32,64,128,200,256")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    counts = [int(n) for n in args.sequences.split(",")]
    llm = LLM("tiny-llama", max_num_seqs=max(counts), max_model_len=256)
    rows = []
    for count in counts:
        measure(llm, count, args.tokens)  # warm
        rows.append(
            min((measure(llm, count, args.tokens) for _ in range(3)), key=lambda row: row["host_us_per_step"])
        )
    print(json.dumps({"model": "tiny-llama", "rows": rows}))


if __name__ == "__main__":
    main()
