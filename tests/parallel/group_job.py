"""What each process of a group runs: `python group_job.py PORT COUNT INDEX MODEL OPTIONS`. The leader prints what it computed as JSON."""

from __future__ import annotations

import json
import sys

import numpy as np

from jaxinfer import LLM, SamplingParams


def answers(llm: LLM) -> dict:
    """Of everything that a runner does but images."""
    prompts = [[5, 9, 11, 3], [7] * 20, [5, 9, 11, 3, 8, 2]]
    params = [
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, presence_penalty=1.5, logprobs=2),
        SamplingParams(max_tokens=12, temperature=0.9, seed=7, ignore_eos=True, logit_bias={4: 3.0}),
    ]
    results = llm.generate(prompts, params)
    logits = llm.logits(prompts[1])
    states = llm.hidden_states(prompts[0], [0, -1])
    return {
        "tokens": [list(result.outputs[0].token_ids) for result in results],
        "logits": np.asarray(logits[-1], np.float64).tolist(),
        "states": np.asarray(states[-1], np.float64).sum(-1).tolist(),
    }


if __name__ == "__main__":
    port, count, index, model, options = sys.argv[1:]
    llm = LLM(
        model,
        warm_up=False,
        max_num_seqs=4,
        max_model_len=64,
        coordinator=f"127.0.0.1:{port}",
        num_processes=int(count),
        process_id=int(index),
        **json.loads(options),
    )
    print(json.dumps(answers(llm)))
