"""Sampling on the device: the distribution it draws from, and that rows do not know of each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.sampling import RowParams, SamplerState, draw, first_argmax, logprobs_of, sample

VOCAB = 300
DEFAULTS = {
    "slot": 0, "top_k": 0, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
INTS = ("slot", "top_k", "position")


def rows(count: int, seed: int = 0, **values) -> RowParams:
    """Parameters of `count` rows at positions 0, 1, 2, …: scalars are for all, lists for each."""
    merged = {**DEFAULTS, "position": np.arange(count), **values}
    arrays = {
        k: jnp.asarray(np.broadcast_to(v, count), jnp.int32 if k in INTS else jnp.float32)
        for k, v in merged.items()
    }
    return RowParams(seed=jnp.tile(jnp.array([seed, 0], jnp.int32), (count, 1)), **arrays)


def frequencies(logits: np.ndarray, count: int = 20_000, **params) -> np.ndarray:
    repeated = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    tokens = np.asarray(jax.jit(draw)(repeated, rows(count, **params)))
    return np.bincount(tokens, minlength=len(logits)) / count


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def reference(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The distribution by sorting, as every textbook writes it."""
    probabilities = softmax((logits - logits.max()) / temperature)
    order = np.argsort(-probabilities)
    if top_k:
        probabilities[order[top_k:]] = 0
        probabilities /= probabilities.sum()
    if top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= top_p]] = 0
    probabilities[probabilities < min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.5},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1.0, "temperature": 0.7},
        {"temperature": 1e-30},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_draws_follow_the_textbook_distribution(params: dict):
    logits = np.random.default_rng(0).standard_normal(VOCAB) * 2
    expected = reference(logits, **params)
    seen = frequencies(logits, **params)
    assert seen[expected == 0].sum() == 0
    # Half the L1 distance of 20,000 draws over the support is of the order sqrt(support / draws).
    assert np.abs(seen - expected).sum() / 2 < 1.2 * np.sqrt(np.count_nonzero(expected) / 20_000) + 1e-3


def test_flat_logits_reach_every_token_and_no_other():
    seen = frequencies(np.zeros(VOCAB))
    assert np.count_nonzero(seen) == VOCAB


def test_positions_and_seeds_give_different_draws_and_repeat():
    logits = jnp.zeros((64, VOCAB))
    one = np.asarray(draw(logits, rows(64, seed=1)))
    assert len(set(one.tolist())) > 40
    np.testing.assert_array_equal(one, draw(logits, rows(64, seed=1)))
    assert (one != np.asarray(draw(logits, rows(64, seed=2)))).mean() > 0.9


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.standard_normal((16, VOCAB)) * 3, jnp.float32)
    params = {
        "temperature": rng.choice([0.0, 0.7, 1.3], 16), "top_k": rng.choice([0, 5, 50], 16),
        "top_p": rng.choice([0.3, 0.9, 1.0], 16), "min_p": rng.choice([0.0, 0.1], 16),
    }  # fmt: skip
    together, _ = sample(logits, rows(16, **params))
    for i in range(16):
        alone_params = rows(1, position=[i], **{k: v[i : i + 1] for k, v in params.items()})
        alone, _ = sample(logits[i : i + 1], alone_params)
        assert alone[0] == together[i]


def test_greedy_takes_the_first_of_equals():
    logits = jnp.zeros((2, VOCAB)).at[:, [5, 9]].set(1.0)
    tokens, _ = sample(logits, rows(2, temperature=0.0))
    np.testing.assert_array_equal(tokens, [5, 5])
    np.testing.assert_array_equal(first_argmax(logits), [5, 5])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_marks_its_own_row_alone(temperature: float):
    logits = jnp.zeros((3, VOCAB)).at[:, 4].set(50.0).at[1, 7].set(jnp.nan)
    tokens, _ = sample(logits, rows(3, temperature=temperature))
    np.testing.assert_array_equal(tokens, [4, -1, 4])


def test_minus_infinity_is_never_drawn():
    logits = np.full(VOCAB, -np.inf)
    logits[[0, 127, 128, 299]] = 0.0
    seen = frequencies(logits)
    np.testing.assert_allclose(seen[[0, 127, 128, 299]], 0.25, atol=0.02)


def state_with(counts: dict[int, int], slots: int = 3) -> SamplerState:
    array = np.zeros((slots, VOCAB), np.int32)
    for token, count in counts.items():
        array[1, token] = count
    return SamplerState(
        counts=jnp.asarray(array),
        bias=jnp.zeros((slots, VOCAB)),
        allowed=jnp.full((slots, -(-VOCAB // 32)), -1, jnp.int32),
    )


def test_penalties_see_what_they_should():
    """Repetition: prompt and output; presence and frequency: output only (OpenAI's and CTRL's definitions)."""
    state = state_with({10: 1, 11: 2, 12: 6})  # in the prompt; generated once; generated three times
    logits = jnp.zeros((1, VOCAB)).at[0, 10:13].set(jnp.array([4.0, 4.0, -4.0]))

    def penalised(**params) -> list[float]:
        from jaxinfer.engine.sampling import apply_penalties

        return np.asarray(apply_penalties(logits, rows(1, slot=1, **params), state))[0, 9:13].tolist()

    assert penalised() == [0, 4, 4, -4]
    assert penalised(repetition_penalty=2.0) == [0, 2, 2, -8]
    assert penalised(presence_penalty=1.5) == [0, 4, 2.5, -5.5]
    assert penalised(frequency_penalty=0.5) == [0, 4, 3.5, -5.5]


def test_tokens_are_counted_in_their_own_slot():
    logits = jnp.zeros((2, VOCAB)).at[0, 8].set(9.0).at[1, 9].set(9.0)
    _, state = sample(logits, rows(2, slot=[2, 0], temperature=0.0), state_with({}))
    assert state is not None
    expected = np.zeros((3, VOCAB), np.int32)
    expected[2, 8] = expected[0, 9] = 2
    np.testing.assert_array_equal(state.counts, expected)


def test_bias_can_forbid_and_force():
    state = state_with({})
    state = state._replace(bias=state.bias.at[1, 3].set(-jnp.inf).at[2, 77].set(100.0))
    logits = jnp.zeros((2, VOCAB)).at[:, 3].set(5.0)
    tokens, _ = sample(logits, rows(2, slot=[1, 2], temperature=0.0), state)
    assert tokens.tolist() == [0, 77]


def test_logprobs():
    logits = np.random.default_rng(1).standard_normal((4, VOCAB)).astype(np.float32)
    scores = logprobs_of(jnp.asarray(logits), jnp.array([0, 5, 299, -1]))
    expected = np.log([softmax(row) for row in logits.astype(np.float64)])
    np.testing.assert_allclose(scores.chosen[:3], expected[[0, 1, 2], [0, 5, 299]], atol=1e-5)
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-expected, axis=1)[:, :20])
    np.testing.assert_allclose(scores.top, -np.sort(-expected, axis=1)[:, :20], atol=1e-5)
