"""Sampling where the vocabulary is split among devices: the tokens and log-probabilities of one device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxinfer.config.mesh import MeshConfig
from jaxinfer.engine.sampling import RowParams, SamplerState, logprobs_of, sample
from jaxinfer.parallel.collectives import on_mesh
from jaxinfer.parallel.mesh import make_mesh, partition

ROWS, VOCAB = 24, 1024


def rows_of(seed: int) -> RowParams:
    """Greedy, plain, top-k, top-p and min-p rows, mixed."""
    rng = np.random.default_rng(seed)
    return RowParams(
        slot=jnp.arange(ROWS),
        top_k=jnp.asarray(rng.choice([0, 1, 5, 300], ROWS), jnp.int32),
        seed=jnp.asarray(rng.integers(0, 2**31, (ROWS, 2)), jnp.int32),
        position=jnp.asarray(rng.integers(0, 1000, ROWS), jnp.int32),
        temperature=jnp.asarray(rng.choice([0.0, 0.3, 1.0, 2.0], ROWS), jnp.float32),
        top_p=jnp.asarray(rng.choice([1.0, 0.9, 0.2], ROWS), jnp.float32),
        min_p=jnp.asarray(rng.choice([0.0, 0.05], ROWS), jnp.float32),
        presence_penalty=jnp.asarray(rng.choice([0.0, 0.7], ROWS), jnp.float32),
        frequency_penalty=jnp.asarray(rng.choice([0.0, 0.3], ROWS), jnp.float32),
        repetition_penalty=jnp.asarray(rng.choice([1.0, 1.3], ROWS), jnp.float32),
    )


def state_of(seed: int) -> SamplerState:
    rng = np.random.default_rng(seed)
    return SamplerState(
        counts=jnp.asarray(rng.integers(0, 4, (ROWS, VOCAB)), jnp.int32),
        bias=jnp.asarray(rng.choice([0.0, 2.0, -np.inf], (ROWS, VOCAB), p=[0.8, 0.1, 0.1]), jnp.float32),
        allowed=jnp.asarray(rng.integers(-(2**31), 2**31, (ROWS, VOCAB // 32)), jnp.int32),
    )


def split(run, tp: int, in_specs, out_specs):
    mesh = make_mesh(MeshConfig(tp=tp))

    def on_one(*args):
        with on_mesh(mesh):
            return run(*args)

    return jax.jit(jax.shard_map(on_one, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


VOCAB_SPLIT = partition((None, "vocab"), "logits")
STATE = SamplerState._make([VOCAB_SPLIT, VOCAB_SPLIT, P()])


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_and_counts_are_those_of_one_device(tp: int, seed: int):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.standard_normal((ROWS, VOCAB)) * rng.choice([1, 4], (ROWS, 1)), jnp.float32)
    logits = (
        logits.at[0].set(jnp.nan).at[1, 700].set(jnp.nan).at[2].set(jnp.round(logits[2]))
    )  # NaN, one NaN, ties
    rows, state = rows_of(seed), state_of(seed)
    # Row 1's NaN is allowed, in row 3 nothing is.
    state = state._replace(bias=state.bias.at[3].set(-jnp.inf), allowed=state.allowed.at[1].set(-1))
    expected, expected_state = jax.jit(sample)(logits, rows, state)
    specs = (VOCAB_SPLIT, RowParams._make([P()] * len(rows)), STATE)
    tokens, new_state = split(sample, tp, specs, (P(), STATE))(logits, rows, state)
    np.testing.assert_array_equal(tokens, expected)
    assert expected[:2].tolist() == [-1, -1]
    assert expected[3] == -1
    for new, old in zip(new_state, expected_state, strict=True):
        np.testing.assert_array_equal(new, old)
    plain, _ = jax.jit(partial(sample, state=None))(logits, rows)
    split_plain, _ = split(partial(sample, state=None), tp, specs[:2], (P(), P()))(logits, rows)
    np.testing.assert_array_equal(split_plain, plain)


@pytest.mark.parametrize("tp", [2, 8])
def test_log_probabilities_are_those_of_one_device(tp: int):
    rng = np.random.default_rng(tp)
    logits = jnp.asarray(rng.standard_normal((ROWS, VOCAB)) * 3, jnp.float32)
    logits = logits.at[0].set(jnp.round(logits[0]))  # ties: the lower id first
    tokens = jnp.asarray(rng.integers(0, VOCAB, ROWS), jnp.int32)
    expected = jax.jit(logprobs_of)(logits, tokens)
    found = split(logprobs_of, tp, (VOCAB_SPLIT, P()), P())(logits, tokens)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.top, expected.top, atol=1e-5)
    np.testing.assert_allclose(found.chosen, expected.chosen, atol=1e-5)


def test_no_logits_travel():
    rows = rows_of(0)
    logits = jnp.zeros((ROWS, VOCAB))
    specs = (VOCAB_SPLIT, RowParams._make([P()] * len(rows)), STATE)
    text = split(sample, 4, specs, (P(), STATE)).lower(logits, rows, state_of(0)).compile().as_text()
    assert text is not None
    sizes = [
        int(np.prod([int(n) for n in shape.split(",") if n]))
        for line in text.splitlines()
        if any(
            f" {kind}(" in line for kind in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
        )
        for shape in [line.split("[", 1)[1].split("]", 1)[0]]
    ]
    assert len(sizes) >= 3
    assert max(sizes) <= ROWS * 15
