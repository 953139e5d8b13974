"""Where the rows of several tensors lie in the parameter that is made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """Rows of a tensor that lie together in a parameter.

    tensor: which one.
    start: its first row here.
    values: the rows, a view of the parameter.
    """

    tensor: int
    start: int
    values: np.ndarray


def pieces(parameter: np.ndarray, shapes: Sequence[tuple[int, ...]], groups: int) -> Iterator[Piece]:
    """The pieces of a C-contiguous parameter in order: the first of `groups` parts of every tensor, then the second ones."""
    flat, position = parameter.reshape(-1), 0
    for group in range(groups):
        for i, (count, *rest) in enumerate(shapes):
            rows = count // groups
            end = position + rows * math.prod(rest)
            yield Piece(i, group * rows, flat[position:end].reshape(rows, *rest))
            position = end


def swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with its last two axes swapped."""
    return *shape[:-2], shape[-1], shape[-2]
