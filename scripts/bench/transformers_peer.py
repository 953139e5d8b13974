"""Benchmark worker: Hugging Face transformers on torch. Arguments: model (.gguf), dtype. Runs in .venv-peers."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from protocol import DECODE_PROMPT, DECODE_TOKENS, PREFILL_PROMPT, mixed_requests, prompts, serve

STATIC_BATCH = 16


def load():
    import torch
    from transformers import AutoModelForCausalLM

    path, dtype = sys.argv[1:3]
    model = AutoModelForCausalLM.from_pretrained(
        os.path.dirname(path), gguf_file=os.path.basename(path), dtype=getattr(torch, dtype)
    ).eval()

    @torch.inference_mode()
    def generate(batch: list[list[int]], tokens: int) -> None:
        """Static batching: left padding, and everyone waits for the longest."""
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )

    @torch.inference_mode()
    def decode(batch: int, round_: int) -> dict[str, Any]:
        ids = torch.tensor(prompts(batch, DECODE_PROMPT, round_))
        out = model(ids, use_cache=True, logits_to_keep=1)
        cache, token = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        start = time.perf_counter()
        for _ in range(DECODE_TOKENS - 1):
            out = model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
        return {"tokens_per_s": batch * (DECODE_TOKENS - 1) / (time.perf_counter() - start)}

    def run(workload: str, round_: int) -> dict[str, Any]:
        if workload.startswith("decode-"):
            return decode(int(workload.removeprefix("decode-")), round_)
        start = time.perf_counter()
        if workload == "prefill":
            with torch.inference_mode():
                model(torch.tensor(prompts(1, PREFILL_PROMPT, round_)), use_cache=True, logits_to_keep=1)
            return {"tokens_per_s": PREFILL_PROMPT / (time.perf_counter() - start)}
        requests = mixed_requests()
        for first in range(0, len(requests), STATIC_BATCH):
            part = requests[first : first + STATIC_BATCH]
            generate([prompt for prompt, _ in part], max(tokens for _, tokens in part))
        return {"tokens_per_s": sum(tokens for _, tokens in requests) / (time.perf_counter() - start)}

    return run


if __name__ == "__main__":
    serve(load)
