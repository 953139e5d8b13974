"""Benchmark worker: llama.cpp through llama-cpp-python, one sequence at a time. Argument: model (.gguf). Runs in .venv-peers."""

from __future__ import annotations

import sys
import time
from typing import Any

from protocol import DECODE_PROMPT, DECODE_TOKENS, PREFILL_PROMPT, prompts, serve


def load():
    from llama_cpp import Llama

    llm = Llama(sys.argv[1], n_ctx=2048, n_batch=512, n_threads=2, n_threads_batch=2, verbose=False)

    def run(workload: str, round_: int) -> dict[str, Any]:
        llm.reset()
        if workload == "prefill":
            [prompt] = prompts(1, PREFILL_PROMPT, round_)
            start = time.perf_counter()
            llm.eval(prompt)
            return {"tokens_per_s": PREFILL_PROMPT / (time.perf_counter() - start)}
        if workload != "decode-1":
            return {}
        [prompt] = prompts(1, DECODE_PROMPT, round_)
        llm.eval(prompt)
        token = llm.sample(temp=0.0)
        start = time.perf_counter()
        for _ in range(DECODE_TOKENS - 1):
            llm.eval([token])
            token = llm.sample(temp=0.0)
        return {"tokens_per_s": (DECODE_TOKENS - 1) / (time.perf_counter() - start)}

    return run


if __name__ == "__main__":
    serve(load)
