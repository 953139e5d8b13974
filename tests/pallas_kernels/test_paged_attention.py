"""Paged attention against dense float64 attention written out with loops."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention

HEAD_DIM = 16


def dense(q, k, v, q_start, scale, window, chunk, softcap=None, sinks=None) -> np.ndarray:
    """Attention of consecutive queries [Q, H, hd] over keys and values [T, KV, hd] of one sequence, float64."""
    queries, heads, hd = q.shape
    group = heads // k.shape[1]
    out = np.zeros((queries, heads, hd))
    for j in range(queries):
        position = q_start + j
        first = 0
        if window is not None:
            first = max(first, position - window + 1)
        if chunk is not None:
            first = max(first, position // chunk * chunk)
        for h in range(heads):
            keys, values = k[first : position + 1, h // group], v[first : position + 1, h // group]
            scores = keys @ q[j, h] * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            sink = 0.0 if sinks is None else np.exp(sinks[h])
            weights = np.exp(scores)
            out[j, h] = weights @ values / (weights.sum() + sink)
    return out


@pytest.fixture(autouse=True, params=["reference", "native"])
def implementation(request: pytest.FixtureRequest) -> None:
    """Every test runs with every implementation."""
    Case.impl = request.param


class Case:
    """Sequences scattered over pages in random order; everything that no query may read is NaN."""

    impl: ClassVar[str]

    def __init__(
        self, seed: int, starts: list[int], queries: int, *, page: int, heads: int, kv_heads: int, width: int
    ):
        rng = np.random.default_rng(seed)
        rows = len(starts)
        self.starts = np.array(starts, np.int32)
        self.lens = self.starts + queries
        self.q = rng.standard_normal((rows, queries, heads, HEAD_DIM))
        self.keys = [rng.standard_normal((n, kv_heads, HEAD_DIM)) for n in self.lens]
        self.values = [rng.standard_normal((n, kv_heads, HEAD_DIM)) for n in self.lens]
        self.pages: Any = np.full((2, kv_heads, rows * width + 1, page, HEAD_DIM), np.nan, np.float32)
        self.tables = np.zeros((rows, width), np.int32)
        free = rng.permutation(np.arange(1, rows * width + 1)).tolist()
        for r, length in enumerate(self.lens):
            for i in range(-(-length // page)):
                p = self.tables[r, i] = free.pop()
                part = slice(i * page, min((i + 1) * page, length))
                filled = part.stop - part.start
                self.pages[0, :, p, :filled] = self.keys[r][part].transpose(1, 0, 2)
                self.pages[1, :, p, :filled] = self.values[r][part].transpose(1, 0, 2)

    def forget(self, row: int, positions: int, page: int) -> None:
        """Gives back the row's pages that hold only the first `positions` positions, as a page group does."""
        self.tables[row, : positions // page] = 0

    def run(self, **options) -> np.ndarray:
        """With the implementation under test, unless another is named."""
        arrays = (jnp.asarray(self.q, jnp.float32), self.pages, self.tables, self.starts, self.lens)
        return np.asarray(
            paged_attention(*map(jnp.asarray, arrays), scale=0.3, **{"impl": self.impl, **options})
        )

    def expected(self, window=None, chunk=None, softcap=None, sinks=None) -> np.ndarray:
        rows = zip(self.q, self.keys, self.values, self.starts, strict=True)
        return np.stack(
            [dense(q, k, v, start, 0.3, window, chunk, softcap, sinks) for q, k, v, start in rows]
        )


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("queries", [1, 7])
def test_equals_dense_attention(heads: int, kv_heads: int, queries: int):
    case = Case(0, [0, 1, 15, 16, 17, 300], queries, page=16, heads=heads, kv_heads=kv_heads, width=20)
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-6)


@pytest.mark.parametrize("page", [1, 4, 64, 512])
def test_any_page_size_and_more_than_one_turn_of_the_loop(page: int):
    width = -(-620 // page)
    case = Case(1, [0, 255, 256, 257, 600], 3, page=page, heads=4, kv_heads=2, width=width)
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-6)


@pytest.mark.parametrize("window", [1, 7, 8, 9, 260])
def test_sliding_window_reads_nothing_before_it(window: int):
    starts = [0, window - 1, window, window + 1, 500]
    case = Case(2, starts, 2, page=4, heads=2, kv_heads=1, width=128)
    for row, start in enumerate(starts):
        case.forget(row, max(0, start - window + 1), 4)
    np.testing.assert_allclose(case.run(window=window), case.expected(window=window), atol=2e-6)


@pytest.mark.parametrize("chunk", [8, 10, 300])
def test_chunks_do_not_see_each_other(chunk: int):
    starts = [0, chunk - 1, chunk, 450]
    case = Case(3, starts, 3, page=4, heads=2, kv_heads=1, width=128)
    for row, start in enumerate(starts):
        case.forget(row, start // chunk * chunk, 4)
    np.testing.assert_allclose(case.run(chunk=chunk), case.expected(chunk=chunk), atol=2e-6)


@pytest.mark.parametrize("queries", [1, 5])
def test_soft_cap_and_sinks(queries: int):
    case = Case(7, [0, 3, 300], queries, page=16, heads=4, kv_heads=2, width=20)
    sinks = jnp.array([-1.0, 0.0, 2.0, 5.0], jnp.float32)
    options: list[dict[str, Any]] = [
        {"softcap": 0.7},
        {"sinks": sinks},
        {"softcap": 1.5, "sinks": sinks, "window": 9},
    ]
    for chosen in options:
        if Case.impl == "native":
            with pytest.raises(ValueError, match="cannot do"):
                case.run(**chosen)
        np.testing.assert_allclose(case.run(**chosen, impl="auto"), case.expected(**chosen), atol=2e-6)


def test_padding_rows_are_zero_and_harm_nobody():
    case = Case(4, [5, 0, 300], 1, page=16, heads=2, kv_heads=1, width=32)
    expected = case.expected()
    case.lens[1] = 0
    result = case.run()
    np.testing.assert_array_equal(result[1], 0)
    np.testing.assert_allclose(result[[0, 2]], expected[[0, 2]], atol=2e-6)


def test_bfloat16_pages():
    case = Case(5, [3, 40], 2, page=16, heads=4, kv_heads=2, width=4)
    case.pages = jnp.asarray(case.pages, jnp.bfloat16)
    # bfloat16 rounds keys and values to 8 bits: 2^-9 of values near 3, and of scores near 3.
    np.testing.assert_allclose(case.run(), case.expected(), atol=0.03)


def test_unknown_implementation_is_refused():
    case = Case(6, [0], 1, page=16, heads=1, kv_heads=1, width=1)
    with pytest.raises(ValueError, match="impl must be"):
        case.run(impl="magic")
