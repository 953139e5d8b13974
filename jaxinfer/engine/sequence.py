"""What scheduler and engine hand each other: a completion in the making, and the work of a step. No JAX in here."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxinfer.engine.media import PromptMedia
from jaxinfer.kv.manager import PagedTokens, TableUpdate


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()  # holds no slot and no pages; new, or preempted
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence(PagedTokens):
    """Prompt and generated tokens of one completion, and where it stands. The scheduler writes it, the engine reads it.

    A decoding sequence always has num_computed + 1 == len(tokens) + num_pending: the next step computes the KV of its
    newest token, which the host may not have read yet.

    Attributes:
      seq_id: unique among live sequences.
      num_prompt: tokens of the prompt: the first of `tokens`.
      max_total: prompt and generated tokens may not exceed it; the engine finishes a sequence that has so many.
      priority: lower goes first; among equals the earlier arrival.
      leader: sibling with the same prompt (n > 1); this one waits until the leader's prompt is cached or the
        leader gone. The leader must have been added.
      needs_tokens: the next step may be scheduled only when all its tokens are read (its choices depend on them).
      media: images of the prompt, if it has any.
      request: the engine's own; the scheduler does not look at it.
      arrival: order of arrival, set by the scheduler.
      lane: that holds its pages while it runs.
      num_pending: tokens that dispatched steps sample and the host has not read.
      cached_tokens: prompt tokens found in the prefix cache when first admitted.
      num_preemptions: times it lost its pages and had to start again.
    """

    seq_id: int
    num_prompt: int
    max_total: int
    priority: int = 0
    leader: Sequence | None = None
    needs_tokens: bool = False
    media: PromptMedia | None = None
    request: Any = None
    arrival: int = -1
    lane: int = 0
    num_pending: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    status: SequenceStatus = SequenceStatus.WAITING

    @property
    def leader_is_done(self) -> bool:
        """Whether there is no leader to wait for: none, gone, or its prompt computed."""
        leader = self.leader
        return (
            leader is None
            or leader.status is SequenceStatus.FINISHED
            or leader.num_computed >= leader.num_prompt
        )


class PrefillChunk(NamedTuple):
    """Known tokens [start, start + length) of a sequence, computed in one step."""

    seq: Sequence
    start: int
    length: int
    samples: bool  # reaches the end of the known tokens, so the step samples the next one


@dataclass(slots=True)
class Step:
    """Work of one step. After schedule() the counts of its sequences include it.

    Attributes:
      decode: each computes the token at index num_computed - 1 (known, or pending on the device) and samples the next.
        The order is that of the previous step; newcomers are last.
      prefill: chunks of known tokens.
      table_updates: to be applied in order before the step. Entries past a sequence's last page are stale, not 0.
      preempted: lost their slots and pages since the previous step, and wait again.
    """

    decode: list[Sequence] = field(default_factory=list)
    prefill: list[PrefillChunk] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
