"""How layers are cut into stages, and how long stages wait for each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.errors import ConfigError
from jaxinfer.parallel.stages import PipelineOrder, Stage, cut_layers


def slowest(bounds: tuple[int, ...], costs: list[int], last: int) -> int:
    sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
    return max(*sums[:-1], sums[-1] + last) if len(sums) > 1 else sums[0] + last


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 12))
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it(costs: list[int], stages: int, last: int):
    if len(costs) < stages:
        with pytest.raises(ConfigError, match=f"pp={stages} .* has {len(costs)}$"):
            cut_layers(costs, stages, last=last)
        return
    bounds = cut_layers(costs, stages, last=last)
    assert bounds[0] == 0
    assert bounds[-1] == len(costs)
    assert all(a < b for a, b in itertools.pairwise(bounds))
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(slowest((0, *inner, len(costs)), costs, last) for inner in every)
    assert slowest(bounds, costs, last) == best


def test_a_large_head_takes_layers_from_the_last_stage():
    assert cut_layers([1.0] * 8, 2) == (0, 4, 8)
    assert cut_layers([1.0] * 8, 2, last=2.0) == (0, 5, 8)
    assert cut_layers([1, 1, 1, 6, 6], 2) == (0, 4, 5)  # dense layers, then mixtures
    first, last = (Stage(i, (0, 5, 8)) for i in range(2))
    assert (first.layers, first.is_first, first.is_last) == (range(5), True, False)
    assert (last.layers, last.is_first, last.is_last) == (range(5, 8), False, True)


def ticks(stages: int, microbatches: int, steps: int, after: Callable[[int], int]) -> int:
    """Ticks that the steps take, each of as many microbatches; `after`: which one each waits for."""
    order = PipelineOrder(stages)
    seen: list[list[int]] = [[] for _ in range(stages)]
    jobs = [order.add(after(i)) for i in range(steps * microbatches)]
    count = 0
    while work := order.tick():
        count += 1
        for stage, job in work:
            assert stage == 0 or job in seen[stage - 1]
            seen[stage].append(job)
        for stage, job in work:
            assert order.started(job)
            assert order.done(job) == (stage == stages - 1)
    assert seen == [jobs] * stages
    return count


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 8])
def test_one_step_alone_has_the_textbook_bubble(p: int, m: int):
    taken = ticks(p, m, 1, lambda _: -1)
    assert 1 - m / taken == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_steps_that_follow_each_other_have_it_once(p: int):
    """A microbatch of decoding rows needs the tokens of the same rows a step before; so many as stages fill them all."""
    steps = 50
    assert ticks(p, p, steps, lambda i: max(i - p, -1)) == steps * p + p - 1
    # One microbatch alone walks through the stages, and the others wait.
    assert ticks(p, 1, steps, lambda i: i - 1) == steps * p


def test_a_stage_has_its_next_job_only_when_there_is_one():
    order = PipelineOrder(2)
    assert order.tick() == []
    first, second = order.add(), order.add(after=0)
    assert order.tick() == [(0, first)]
    assert order.tick() == [(1, first)]  # the second one waits for its end
    assert order.tick() == [(0, second)]
    assert not order.done(second)
    assert order.tick() == [(1, second)]
    assert order.tick() == []
