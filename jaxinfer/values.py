"""What callers pass in, as Python's own numbers; NumPy's scalars are welcome, look-alikes (True, "5", 1.0 for 1) are not."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
import reprlib


def as_integer(value: object) -> int | None:
    """The integer that a value is, or None for one that is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def as_number(value: object) -> float | None:
    """The finite float that a value is, or None for one that is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    with contextlib.suppress(OverflowError):  # an integer beyond float
        number = float(value)
        if math.isfinite(number):
            return number
    return None


def shown(value: object) -> str:
    """A short picture of a value for a message, on one line."""
    return " ".join(reprlib.repr(value).split())
