"""A model in stages: what its layers cost, where its parameters go, and how much of the KV cache each stage has."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from oracles import load_oracle

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.stages import decode_bytes
from jaxinfer.models.base import DecoderModel
from jaxinfer.models.params import param_specs
from jaxinfer.models.registry import family_for
from jaxinfer.weights.load import num_bytes
from jaxinfer.weights.open import open_checkpoint

ENGINE = {"dtype": "float32", "warm_up": False, "page_size": 4, "prefill_block": 8, "max_prefill_tokens": 16}


def model_of(name: str) -> DecoderModel:
    checkpoint = open_checkpoint(load_oracle(name).path)
    return family_for(checkpoint.config).model(checkpoint.model_config(), dtype="float32")


def test_costs_are_what_a_decode_step_reads():
    model = model_of("llama3")
    layers, head = decode_bytes(model, 8)
    config = model.config
    assert head == config.vocab_size * config.hidden_size * 4
    assert len(set(layers)) == 1
    embedding_and_norm = head + config.hidden_size * 4
    assert sum(layers) + head + embedding_and_norm == sum(map(num_bytes, param_specs(model)))


def test_of_a_mixture_the_experts_that_rows_choose_count():
    model = model_of("qwen3_moe")
    moe = model.config.moe
    assert moe is not None
    experts = sum(
        num_bytes(s) for s in param_specs(model) if s.path[:2] == ("layers", 0) and "experts" in s.axes
    )
    one, many = (decode_bytes(model, rows)[0][0] for rows in (1, 10_000))
    assert many - one == pytest.approx(experts * (1 - moe.top_k / moe.num_experts))


def test_kv_cache_bytes_are_of_all_stages_together():
    llm = LLM(
        load_oracle("llama3").path, pp=3, max_num_seqs=2, max_model_len=64, kv_cache_bytes=2**20, **ENGINE
    )
    assert isinstance(llm.engine, Engine)
    caches = [stage.cache for stage in llm.engine._runner.stages]
    assert len({array.shape for cache in caches for array in cache}) == 1
    total = sum(array.nbytes for cache in caches for array in cache)
    page = total // (llm.engine.num_pages + 1)
    assert 2**20 - page < total <= 2**20


def test_saved_from_stages_and_opened_in_others(tmp_path: Path):
    """Tied embeddings, which the first and the last stage share, are saved once."""
    oracle = load_oracle("gemma3_text")
    llm = LLM(oracle.path, pp=2, **ENGINE)
    llm.save(tmp_path / "saved")
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for degrees in ({}, {"pp": 3}):
        again = LLM(tmp_path / "saved", max_num_seqs=2, **degrees, **ENGINE)
        assert len(again.params) == len(llm.params)
        for a, b in zip(jax.device_get(llm.params), jax.device_get(again.params), strict=True):
            assert (a == b).all()
    outputs = again.generate(oracle.prompts, params)
    assert [out.outputs[0].token_ids for out in outputs] == [ids[:8] for ids in oracle.greedy]
