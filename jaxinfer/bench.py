"""`jaxinfer bench`: throughput and latency of the engine in this process, with random prompts. JSON out.

TTFT is from a request's arrival to its first token, ITL from one token of a request to its next, both in milliseconds as the caller of
`Engine.step` sees them.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxinfer.cli import ArgumentParser, guarded
from jaxinfer.engine_flags import add_engine_flags, load_model
from jaxinfer.errors import ConfigError

if TYPE_CHECKING:
    from jaxinfer.api import LLM


@dataclass(slots=True)
class _Timed:
    """One request of the benchmark; times in seconds since its start."""

    arrival: float
    prompt: list[int]
    tokens: int
    times: list[float] = field(default_factory=list)  # when each token was seen


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return guarded(_main, sys.argv[1:] if argv is None else argv)


def _main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(
        prog="jaxinfer bench", description="Throughput and latency of the engine, in this process."
    )
    parser.add_argument("--model", metavar="M", help="a preset, a directory or a .gguf file")
    parser.add_argument("--num-prompts", type=int, default=64, metavar="N", help="requests (default 64)")
    parser.add_argument(
        "--input-len", type=int, default=128, metavar="N", help="tokens of a prompt (default 128)"
    )
    parser.add_argument(
        "--output-len", type=int, default=128, metavar="N", help="tokens to generate (default 128)"
    )
    parser.add_argument(
        "--range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths vary by this share up and down (default 0)",
    )
    parser.add_argument(
        "--request-rate", type=float, metavar="R", help="requests a second, Poisson (default: all at once)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    add_engine_flags(parser)
    args = parser.parse(argv)
    if not args.model:
        parser.error("--model is required")
    for name in ("num_prompts", "input_len", "output_len"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not 0 <= args.range_ratio < 1:
        raise ConfigError(f"--range-ratio must be in [0, 1), got {args.range_ratio}")
    if args.request_rate is not None and args.request_rate <= 0:
        raise ConfigError(f"--request-rate must be above 0, got {args.request_rate}")

    start = time.perf_counter()
    llm = load_model(args)
    load_s = time.perf_counter() - start
    requests = _requests(args, llm.vocab_size)
    seconds = _serve(llm, requests)
    print(json.dumps({"model": args.model, "load_s": round(load_s, 2), **_report(requests, seconds)}))
    return 0


def _requests(args: Any, vocab_size: int) -> list[_Timed]:
    rng = random.Random(args.seed)

    def length(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - args.range_ratio, 1 + args.range_ratio)))

    arrival = 0.0
    requests = []
    for _ in range(args.num_prompts):
        prompt = [rng.randrange(vocab_size) for _ in range(length(args.input_len))]
        requests.append(_Timed(arrival, prompt, length(args.output_len)))
        if args.request_rate is not None:
            arrival += rng.expovariate(args.request_rate)
    return requests


def _serve(llm: LLM, requests: list[_Timed]) -> float:
    """Runs all requests at their times of arrival; returns the seconds until the last is done."""
    from jaxinfer.engine.request import SamplingParams

    waiting = deque(enumerate(requests))
    start = time.perf_counter()
    while waiting or llm.engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while waiting and waiting[0][1].arrival <= now:
            i, request = waiting.popleft()
            params = SamplingParams(max_tokens=request.tokens, temperature=0, ignore_eos=True)
            llm.engine.add_request(str(i), request.prompt, params)
        if not llm.engine.has_unfinished_requests():
            time.sleep(min(0.001, waiting[0][1].arrival - now))
            continue
        changed = llm.engine.step()
        now = time.perf_counter() - start
        for output in changed:
            request = requests[int(output.request_id)]
            count = len(output.outputs[0].token_ids)
            request.times += [now] * (count - len(request.times))
    return time.perf_counter() - start


def _report(requests: list[_Timed], seconds: float) -> dict[str, Any]:
    ttft = [r.times[0] - r.arrival for r in requests]
    itl = [b - a for r in requests for a, b in zip(r.times, r.times[1:], strict=False)]
    generated = sum(len(r.times) for r in requests)
    return {
        "requests": len(requests),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(len(r.prompt) for r in requests),
        "generated_tokens": generated,
        "requests_per_s": round(len(requests) / seconds, 2),
        "generated_tokens_per_s": round(generated / seconds, 1),
        "ttft_ms": _percentiles(ttft),
        "itl_ms": _percentiles(itl),
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """Mean and nearest-rank percentiles, in milliseconds; empty when there is nothing to count."""
    if not seconds:
        return {}
    ordered = sorted(s * 1e3 for s in seconds)
    ranks = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}
    return {name: round(value, 2) for name, value in {"mean": sum(ordered) / len(ordered), **ranks}.items()}


if __name__ == "__main__":
    sys.exit(main())
