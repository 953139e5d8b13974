"""Logits and hidden states without the engine: what they are of, and what they refuse."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.errors import RequestError

IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-llama", max_model_len=64, max_num_seqs=1, warm_up=False)


def test_logits_of_a_prefix_are_a_prefix_of_the_logits(llm: LLM):
    whole = llm.logits(IDS)
    assert (whole.shape, whole.dtype) == ((4, 512), np.float32)
    np.testing.assert_allclose(llm.logits(IDS[:2]), whole[:2], atol=1e-5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("ids", [tuple(IDS), np.array(IDS), np.array(IDS, np.uint16), jnp.array(IDS)])
def test_ids_of_any_kind(llm: LLM, ids):
    np.testing.assert_array_equal(llm.logits(ids), llm.logits(IDS))
    np.testing.assert_array_equal(llm.hidden_states(ids, [1])[1], llm.hidden_states(IDS, [1])[1])


@pytest.mark.usefixtures("unchecked")
def test_layers(llm: LLM):
    states = llm.hidden_states(IDS, [0, 1, 2, -1])
    assert {layer: state.shape for layer, state in states.items()} == dict.fromkeys([0, 1, 2, -1], (4, 64))
    np.testing.assert_array_equal(states[2], states[-1])
    assert not np.array_equal(states[0], states[1])
    assert list(llm.hidden_states(IDS, tuple(np.array([1, -3])))) == [1, -3]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "ids",
    [
        [],
        [-1],
        [512],
        [10**12],
        [10**30],
        [1.7],
        [True, 1],
        ["a"],
        "abc",
        None,
        5,
        [[1, 2]],
        np.ones((1, 2), int),
        [1] * 65,
    ],
)
def test_bad_ids(llm: LLM, ids):
    for call in (llm.logits, lambda ids: llm.hidden_states(ids, [0])):
        with pytest.raises(RequestError) as caught:
            call(ids)
        assert caught.value.param == "token_ids"
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("layers", [1, None, "0", ["0"], [1.0], [True], [3], [-4], [10**30]])
def test_bad_layers(llm: LLM, layers):
    with pytest.raises(RequestError) as caught:
        llm.hidden_states(IDS, layers)
    assert caught.value.param == "layers"
