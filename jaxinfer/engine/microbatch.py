"""A step in parts, for the stages of a pipeline to work on at the same time. Pure Python."""

from __future__ import annotations

from jaxinfer.engine.sequence import PrefillChunk, Step


def split_step(step: Step, most: int, block: int) -> list[Step]:
    """At most so many parts, each with an even share of the decoding sequences and of the prefill blocks, in their order.

    A chunk may be cut between two blocks; its parts follow each other. No part is empty, and none but the first has table
    updates, which are of the whole step.

    Args:
      block: tokens of a prefill block.
    """
    decode, blocks = len(step.decode), sum(-(-chunk.length // block) for chunk in step.prefill)
    count = min(most, max(decode, blocks))
    if count < 2:
        return [step]
    parts = [Step(decode=step.decode[decode * i // count : decode * (i + 1) // count]) for i in range(count)]
    parts[0].table_updates, parts[0].preempted = step.table_updates, step.preempted
    part, room = -1, 0  # blocks that the part still takes
    for seq, start, length, samples in step.prefill:
        end = start + length
        while start < end:
            while not room:
                part += 1
                room = blocks * (part + 1) // count - blocks * part // count
            stop = min(end, start + room * block)
            parts[part].prefill.append(PrefillChunk(seq, start, stop - start, samples and stop == end))
            room -= -(-(stop - start) // block)
            start = stop
    return parts
