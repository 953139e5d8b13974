"""Latent attention, in both forms, against dense float64 attention over keys and values written out."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.mla_attention.api import Form, cheaper_form

SCALE = 0.3


@pytest.fixture(
    autouse=True,
    params=[("absorbed", "reference"), ("absorbed", "native"), ("expanded", "reference")],
    ids=lambda param: "-".join(param),
)
def implementation(request: pytest.FixtureRequest) -> None:
    """Every test runs with every implementation of either form."""
    Case.form, Case.impl = request.param


class Case:
    """Sequences scattered over pages in random order; everything that no query may read is NaN."""

    form: ClassVar[Form]
    impl: ClassVar[str]

    def __init__(
        self,
        seed: int,
        starts: list[int],
        queries: int,
        *,
        page: int = 16,
        width: int = 20,
        heads: int = 3,
        nope: int = 16,
        rope: int = 8,
        value: int = 24,
        rank: int = 48,
    ):
        rng = np.random.default_rng(seed)
        rows = len(starts)
        self.nope, self.rank = nope, rank
        self.starts = np.array(starts, np.int32)
        self.lens = self.starts + queries
        self.q = rng.standard_normal((rows, queries, heads, nope + rope))
        self.kv_b = rng.standard_normal((heads, nope + value, rank)) * rank**-0.5
        self.latents = [rng.standard_normal((n, rank + rope)) for n in self.lens]
        self.pages: Any = np.full((1, 1, rows * width + 1, page, rank + rope), np.nan, np.float32)
        self.tables = np.zeros((rows, width), np.int32)
        free = rng.permutation(np.arange(1, rows * width + 1)).tolist()
        for r, length in enumerate(self.lens):
            for i in range(-(-length // page)):
                p = self.tables[r, i] = free.pop()
                part = slice(i * page, min((i + 1) * page, length))
                self.pages[0, 0, p, : part.stop - part.start] = self.latents[r][part]

    def run(self, rows: Any = slice(None), **options) -> np.ndarray:
        q, kv_b = jnp.asarray(self.q[rows], jnp.float32), jnp.asarray(self.kv_b, jnp.float32)
        arrays = q, self.pages, self.tables[rows], self.starts[rows], self.lens[rows], kv_b
        options = {"scale": SCALE, "form": self.form, "impl": self.impl, **options}
        return np.asarray(mla_attention(*map(jnp.asarray, arrays), **options))

    def expected(self) -> np.ndarray:
        out = np.zeros((*self.q.shape[:3], self.kv_b.shape[1] - self.nope))
        for r, j, h in np.ndindex(*self.q.shape[:3]):
            seen = self.latents[r][: self.starts[r] + j + 1]
            keys, values = np.split(seen[:, : self.rank] @ self.kv_b[h].T, [self.nope], axis=1)
            keys = np.concatenate([keys, seen[:, self.rank :]], axis=1)
            weights = np.exp(keys @ self.q[r, j, h] * SCALE)
            out[r, j, h] = weights @ values / weights.sum()
        return out


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("heads", [1, 3, 20, 70])
def test_equals_dense_attention(heads: int, queries: int):
    case = Case(0, [0, 1, 15, 16, 17, 300], queries, heads=heads)
    np.testing.assert_allclose(case.run(), case.expected(), atol=3e-6)


@pytest.mark.parametrize("page", [1, 4, 64, 512])
def test_any_page_size_and_more_than_one_turn_of_the_loop(page: int):
    case = Case(1, [0, 255, 256, 257, 600], 3, page=page, width=-(-620 // page))
    np.testing.assert_allclose(case.run(), case.expected(), atol=3e-6)


@pytest.mark.parametrize(
    "widths",
    [
        {"nope": 5, "rope": 2, "value": 3, "rank": 16},
        {"nope": 33, "rope": 18, "value": 16, "rank": 32},
        {"nope": 16, "rope": 16, "value": 32, "rank": 64},
    ],
)
def test_widths(widths: dict[str, int]):
    case = Case(2, [0, 70, 130], 5, **widths)
    np.testing.assert_allclose(case.run(), case.expected(), atol=5e-6)


def test_latents_of_any_width_are_served_by_xla():
    case = Case(2, [0, 70, 130], 5, nope=5, rope=2, value=3, rank=7)
    if Case.impl == "native":
        with pytest.raises(ValueError, match="cannot do"):
            case.run()
    np.testing.assert_allclose(case.run(impl="auto"), case.expected(), atol=5e-6)


def test_many_heads():
    """As many as DeepSeek-V3 has: a turn of the loop makes keys and values of fewer positions, and the kernel parts the heads."""
    case = Case(3, [0, 150], 2, heads=128, nope=100, value=100, rank=16)
    np.testing.assert_allclose(case.run(), case.expected(), atol=1e-5)


def test_padding_rows_are_zero_and_harm_nobody():
    case = Case(4, [5, 0, 300], 2)
    expected = case.expected()
    case.lens[1] = 0
    case.q[1] = np.nan
    result = case.run()
    np.testing.assert_array_equal(result[1], 0)
    np.testing.assert_allclose(result[[0, 2]], expected[[0, 2]], atol=3e-6)


@pytest.mark.parametrize("queries", [1, 30])
def test_a_row_does_not_depend_on_its_company(queries: int):
    """Bit for bit in the kernel; XLA orders sums by how many rows there are."""
    case = Case(5, [3, 40, 269, 17, 100, 5], queries, heads=5)
    whole = case.run()
    for rows in ([0, 1], [2, 5], [4, 3, 2]):
        np.testing.assert_allclose(case.run(rows), whole[rows], atol=0 if Case.impl == "native" else 1e-6)
    first = case.tables[0, 0]
    case.pages[0, 0, first] = np.nan
    np.testing.assert_array_equal(case.run()[1:], whole[1:])


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float8_e4m3fn", 4)])
def test_narrow_pages(dtype: str, bits: int):
    case = Case(6, [3, 40], 2, rope=6)
    case.pages = jnp.asarray(case.pages, dtype)
    result = case.run(impl="auto" if dtype.startswith("float8") else Case.impl)
    assert result.dtype == np.float32
    rounded = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in case.latents]
    np.testing.assert_allclose(rounded[0], case.latents[0], rtol=2.0**-bits, atol=2**-9)
    case.latents = rounded
    np.testing.assert_allclose(result, case.expected(), atol=3e-6)


def test_bfloat16_queries_give_bfloat16():
    case = Case(7, [3, 40], 2)
    q, kv_b = (jnp.asarray(x, jnp.bfloat16) for x in (case.q, case.kv_b))
    pages, tables, starts, lens = map(jnp.asarray, (case.pages, case.tables, case.starts, case.lens))
    result = mla_attention(q, pages, tables, starts, lens, kv_b, scale=SCALE, form=Case.form, impl=Case.impl)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(result, np.float32), case.expected(), atol=0.03)


def test_compiles_without_the_expanded_context():
    """Whatever the context's length, no buffer holds keys of all its positions."""
    case = Case(9, [0], 1, heads=64, nope=64, value=64, rank=16)

    def temporary(width: int) -> int:
        tables = np.zeros((1, width), np.int32)
        arrays = case.q.astype(np.float32), case.pages, tables, case.starts, case.lens, np.float32(case.kv_b)

        def run(*arrays: jax.Array) -> jax.Array:
            return mla_attention(*arrays, scale=SCALE, form=Case.form, impl=Case.impl)

        analysis = jax.jit(run).lower(*arrays).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary(4096) < temporary(256) + (1 << 20)


def test_auto_takes_the_form_with_less_arithmetic():
    """The products of a long context counted out, for DeepSeek-V3's widths and others."""
    for nope, rope, value, rank in [(128, 64, 128, 512), (16, 8, 16, 32), (64, 32, 64, 32)]:
        for queries in (1, 16, 64, 170, 171, 172, 512):
            absorbed = queries * (rank + rope + rank)
            expanded = queries * (nope + rope + value) + rank * (nope + value)
            assert (cheaper_form(queries, nope + value, rank) == "expanded") == (expanded < absorbed)
    case = Case(8, [0, 33], 80)
    assert cheaper_form(80, case.kv_b.shape[1], case.rank) == "expanded"
    np.testing.assert_array_equal(
        case.run(form="auto", impl="auto"), case.run(form="expanded", impl="reference")
    )
