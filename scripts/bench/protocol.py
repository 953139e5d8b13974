"""What a benchmark worker is: a process that loads a model, then runs a workload for each line it is sent, and answers in JSON.

Workloads are plain data, the same for every worker. Token ids are random: no worker's text side is measured.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

VOCAB = 49152
DECODE_PROMPT, DECODE_TOKENS = 64, 64
PREFILL_PROMPT = 1024
MIXED_REQUESTS = 64


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, VOCAB) for _ in range(length)] for _ in range(count)]


def mixed_requests(seed: int = 0) -> list[tuple[list[int], int]]:
    """Prompts of 16 to 256 tokens with 16 to 128 tokens to generate, uniform."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(100, VOCAB) for _ in range(rng.randint(16, 256))], rng.randint(16, 128))
        for _ in range(MIXED_REQUESTS)
    ]


def serve(load: Callable[[], Callable[[str, int], dict[str, Any]]]) -> None:
    """Loads, says so, and answers {"workload", "round"} lines until the end of input."""
    start = time.perf_counter()
    run = load()
    print(json.dumps({"load_s": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(request["workload"], request["round"])), flush=True)
