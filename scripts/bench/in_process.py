"""Benchmark worker: the engine without a server. Arguments: model, requests, tokens. Each line of input runs the requests once; prints tokens/s."""

from __future__ import annotations

import sys
import time

from jaxinfer import LLM, SamplingParams

model, requests, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
llm = LLM(model, max_model_len=2048, max_num_seqs=requests)
assert llm.tokenizer is not None
messages = [[{"role": "user", "content": f"Tell me about the number {i}."}] for i in range(requests)]
params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
print("ready", flush=True)
for _ in sys.stdin:
    start = time.perf_counter()
    llm.chat(messages, params)
    print(requests * tokens / (time.perf_counter() - start), flush=True)
