"""What travels between devices, read from a compiled program's text (HLO)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
_OP = re.compile(
    rf"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<kind>{_KINDS})(?P<half>-start|-done)?\((?P<operand>[^,)]*)"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) .*\{$")
_CALL = re.compile(r"\b(body|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SHAPE = re.compile(r"\b([a-z]+\d+)(?:e\d+m\d+\w*)?\[([\d,]*)\]")
_AXES = re.compile(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}")


@dataclass(frozen=True, slots=True, order=True)
class Collective:
    """One kind of exchange.

    Attributes:
      kind: HLO's name of it, such as "all-reduce".
      shape: of its result on one device, such as "f32[64,8192]".
      axes: mesh axes that it goes along, as far as the program says.
      num_bytes: of its result on one device.
    """

    kind: str
    shape: str
    axes: str
    num_bytes: int


@dataclass(slots=True)
class _Computation:
    collectives: list[Collective] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)  # name, times


def collectives(text: str) -> Counter[Collective]:
    """How often one run of a program makes each exchange.

    text: of `compiled.as_text()`. A loop counts as often as it turns, once where that is not known; of a conditional, every branch counts.
    """
    computations, entry = _parse(text)
    found: Counter[Collective] = Counter()

    def visit(name: str, times: int) -> None:
        computation = computations.get(name)
        if computation is None:
            return
        for collective in computation.collectives:
            found[collective] += times
        for callee, each in computation.calls:
            visit(callee, times * each)

    visit(entry, 1)
    return found


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """All computations by name, and the name of the one where the program starts."""
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation()
    axes_of: dict[str, str] = {}  # of collectives that have started
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations[head["name"]] = _Computation()
            entry = head["name"] if head["entry"] else entry
        elif op := _OP.match(line):
            axes = ",".join(re.findall(r"\w+", found[1])) if (found := _AXES.search(line)) else ""
            operand = op["operand"].lstrip("%")
            axes = axes_of.get(operand, axes) if op["half"] == "-done" else axes
            axes_of[op["name"]] = axes
            if op["half"] != "-start":  # its result holds the operands as well, that of -done does not
                shapes = list(_shapes(op["type"]))
                shown = " ".join(shape for shape, _ in shapes)
                size = sum(num_bytes for _, num_bytes in shapes)
                current.collectives.append(Collective(op["kind"], shown, axes, size))
        else:
            turns = int(trips[1]) if (trips := _TRIPS.search(line)) else 1
            for how, callee in _CALL.findall(line):
                current.calls.append((callee, turns if how == "body" else 1))
            if branches := _BRANCHES.search(line):
                current.calls += [(name.strip(" %"), 1) for name in branches[1].split(",")]
    return computations, entry


def _shapes(type_: str) -> Iterator[tuple[str, int]]:
    """Each array of a type as it is written, and its bytes."""
    for found in _SHAPE.finditer(type_):
        bits = int(re.sub(r"\D", "", found[1]))
        count = math.prod(int(n) for n in found[2].split(",") if n)
        yield found[0], -(-bits * count // 8)
