"""Pipeline stages: which layers each has, and in what order they are given work. Pure Python.

A step is cut into microbatches, `jobs` here, numbered in the order they were added. In one tick every stage takes one job: the
next one that the stage before has had in an earlier tick. A step of m microbatches alone leaves each of p stages idle for
p - 1 of m + p - 1 ticks (arXiv:1811.06965); where steps follow each other, the end of one fills the start of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from jaxinfer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """One of a model's stages.

    Attributes:
      bounds: the first layer of each stage, then the number of layers.
    """

    index: int
    bounds: tuple[int, ...]

    @property
    def layers(self) -> range:
        return range(self.bounds[self.index], self.bounds[self.index + 1])

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == len(self.bounds) - 2


def cut_layers(costs: Sequence[float], stages: int, *, last: float = 0.0) -> tuple[int, ...]:
    """Bounds of `stages` runs of layers whose costliest is as cheap as can be, by dynamic programming.

    Among equals the earlier stages have more layers.

    Args:
      costs: of each layer.
      last: what the last stage does beside its layers.
    Raises:
      ConfigError: there are fewer layers than stages.
    """
    count = len(costs)
    if count < stages:
        raise ConfigError(f"pp={stages} needs as many layers at least, and this model has {count}")
    sums = [0.0, *accumulate(costs)]
    # best[end]: the costliest of the stages so far, which have the layers before `end`, and where the last of them starts.
    best: dict[int, float] = {0: 0.0}
    starts: list[dict[int, int]] = []
    for stage in range(stages):
        extra = last if stage == stages - 1 else 0.0
        ends = [count] if stage == stages - 1 else range(stage + 1, count - (stages - stage - 1) + 1)
        found: dict[int, float] = {}
        chosen: dict[int, int] = {}
        for end in ends:
            options = {
                start: max(cost, sums[end] - sums[start] + extra)
                for start, cost in best.items()
                if start < end
            }
            chosen[end] = max(options, key=lambda start: (-options[start], start))
            found[end] = options[chosen[end]]
        best = found
        starts.append(chosen)
    bounds = [count]
    for chosen in reversed(starts):
        bounds.append(chosen[bounds[-1]])
    return tuple(reversed(bounds))


class PipelineOrder:
    """What each stage computes next."""

    def __init__(self, stages: int):
        self._taken = [0] * stages  # jobs that each stage has had
        self._after: list[
            int
        ] = []  # of jobs that the first stage has not had: the job whose end each waits for
        self.num_jobs = 0

    def add(self, after: int = -1) -> int:
        """A job's number. It starts once job `after`, an earlier one, has been through all stages."""
        self._after.append(after)
        self.num_jobs += 1
        return self.num_jobs - 1

    def started(self, job: int) -> bool:
        return job < self._taken[0]

    def done(self, job: int) -> bool:
        return job < self._taken[-1]

    def tick(self) -> list[tuple[int, int]]:
        """(stage, job) of every stage that can work now, all at once. Empty when nothing is left to do."""
        taken = [self.num_jobs, *self._taken]
        ready = [
            stage
            for stage in range(len(self._taken))
            if taken[stage + 1] < taken[stage] and (stage or self.done(self._after[0]))
        ]
        work = [(stage, self._taken[stage]) for stage in ready]
        for stage in ready:
            self._taken[stage] += 1
        if ready[:1] == [0]:
            del self._after[0]
        return work
