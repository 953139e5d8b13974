#!/usr/bin/env python
"""How far each family is from transformers on its recorded checkpoint, by every road a token can take. Prints a Markdown table, or JSON.

    python scripts/oracle_report.py [--json] [NAME ...]

Errors are in standard deviations of the recorded logits, float32. "prefill": logits of all positions at once. "chunks": log-probabilities of the prompt in
chunks of 5, then greedy ids. "shared prefix": greedy ids of prompts whose prefix is cached. "images": logits with images. bfloat16: the median position's mean error.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from oracles import DIRECTORY, Oracle, load_oracle, log_softmax  # pyright: ignore[reportMissingImports]
from safetensors.numpy import load_file

from jaxinfer import LLM, SamplingParams


def report(name: str) -> dict[str, Any]:
    oracle = load_oracle(name)
    greedy = SamplingParams(max_tokens=len(oracle.greedy[0]), temperature=0, ignore_eos=True)
    row: dict[str, Any] = {"family": name}
    llm = open_llm(oracle, max_num_seqs=1)
    row["prefill"] = max(
        error(llm.logits(tokens), logits)
        for tokens, logits in zip(oracle.tokens.tolist(), oracle.logits, strict=True)
    )
    row["images"] = images(llm, name)
    five = {"page_size": 5, "prefill_block": 5, "max_prefill_tokens": 5, "enable_prefix_caching": False}
    outputs = open_llm(oracle, max_num_seqs=2, **five).generate(
        oracle.prompts, greedy.replace(prompt_logprobs=0)
    )
    row["chunks"] = max(
        abs(scored.logprob - log_softmax(logits[i])[scored.token_id]) / logits.std()
        for out, logits in zip(outputs, oracle.logits, strict=True)
        for i, scored in enumerate((out.prompt_logprobs or [])[1:])
        if scored is not None
    )
    row["chunks_ids_equal"] = [out.outputs[0].token_ids for out in outputs] == oracle.greedy
    shared = open_llm(oracle, max_num_seqs=8, page_size=4, prefill_block=8, max_prefill_tokens=16)
    for _ in range(2):
        outputs = shared.generate(oracle.prompts * 2, greedy)
    row["shared_prefix_ids_equal"] = [out.outputs[0].token_ids for out in outputs] == oracle.greedy * 2
    assert all(out.cached_tokens for out in outputs)
    narrow = LLM(oracle.path, dtype="bfloat16", warm_up=False, max_num_seqs=1)
    apart = np.abs(narrow.logits(oracle.tokens[0].tolist()) - oracle.logits[0]).mean(axis=1)
    row["bfloat16"] = float(np.median(apart) / oracle.logits[0].std())
    return row


def open_llm(oracle: Oracle, **options: Any) -> LLM:
    return LLM(oracle.path, dtype="float32", warm_up=False, **options)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / expected.std())


def images(llm: LLM, name: str) -> float | None:
    """Against `intact.safetensors` where there is one: see tests/oracles/README.md."""
    given = load_file(DIRECTORY / name / "expected.safetensors")
    if "image_tokens" not in given:
        return None
    intact = DIRECTORY / name / "intact.safetensors"
    expected = (load_file(intact) if intact.exists() else given)["image_logits"][0]
    tokens = given["image_tokens"][0].tolist()
    return error(llm.logits(tokens, given["pixel_values"], given.get("image_grid_thw")), expected)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    names = args.names or sorted(p.name for p in DIRECTORY.iterdir() if p.is_dir())
    rows = [report(name) for name in names]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print("| family | prefill | chunks of 5, decode | shared prefix | images | bfloat16 |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        ids = [
            "ids equal" if row[f"{road}_ids_equal"] else "IDS DIFFER" for road in ("chunks", "shared_prefix")
        ]
        shown = "–" if row["images"] is None else f"{row['images']:.1e}"
        print(
            f"| {row['family']} | {row['prefill']:.1e} | {row['chunks']:.1e}, {ids[0]} | {ids[1]} | {shown} | {row['bfloat16']:.4f} |"
        )


if __name__ == "__main__":
    main()
