"""Benchmark worker: jaxinfer's own engine. Arguments: model, and a dtype or "packed" for weights in the blocks they are stored in."""

from __future__ import annotations

import sys
import time
from typing import Any

from protocol import DECODE_PROMPT, DECODE_TOKENS, PREFILL_PROMPT, mixed_requests, prompts, serve


def load():
    from jaxinfer import LLM, SamplingParams

    model, dtype = sys.argv[1:3]
    packed = dtype == "packed"
    llm = LLM(
        model,
        dtype=None if packed else dtype,
        weights="packed" if packed else "dense",
        max_num_seqs=32,
        max_model_len=2048,
        enable_prefix_caching=False,
    )

    def greedy(tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

    def decode(batch: int, round_: int) -> dict[str, Any]:
        for i, prompt in enumerate(prompts(batch, DECODE_PROMPT, round_)):
            llm.engine.add_request(str(i), prompt, greedy(DECODE_TOKENS))
        scheduler = llm.engine.scheduler
        while scheduler.waiting or scheduler.prefilling:
            llm.engine.step()
        start, before = time.perf_counter(), sum(len(s.tokens) for s in scheduler.decoding)
        sequences = list(scheduler.decoding)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        seconds = time.perf_counter() - start
        tokens = sum(len(s.tokens) for s in sequences) - before
        return {"tokens_per_s": tokens / seconds}

    def run(workload: str, round_: int) -> dict[str, Any]:
        if workload.startswith("decode-"):
            return decode(int(workload.removeprefix("decode-")), round_)
        start = time.perf_counter()
        if workload == "prefill":
            llm.generate(prompts(1, PREFILL_PROMPT, round_), greedy(1))
            return {"tokens_per_s": PREFILL_PROMPT / (time.perf_counter() - start)}
        requests = mixed_requests()
        llm.generate([prompt for prompt, _ in requests], [greedy(tokens) for _, tokens in requests])
        return {"tokens_per_s": sum(tokens for _, tokens in requests) / (time.perf_counter() - start)}

    return run


if __name__ == "__main__":
    serve(load)
