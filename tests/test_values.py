from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from jaxinfer.values import as_integer, as_number, shown


@pytest.mark.parametrize("value", [5, np.int64(5), np.uint8(5), np.array(5)])
def test_integers(value):
    assert as_integer(value) == 5
    assert type(as_integer(value)) is int


@pytest.mark.parametrize("value", [True, np.True_, 5.0, np.float32(5), "5", None, [5], np.array([5])])
def test_what_is_no_integer(value):
    assert as_integer(value) is None


@pytest.mark.parametrize("value", [2, 2.0, np.int32(2), np.float32(2), Fraction(2)])
def test_numbers(value):
    assert as_number(value) == 2
    assert type(as_number(value)) is float


@pytest.mark.parametrize(
    "value", [True, "2", None, 2j, math.inf, math.nan, np.float32("nan"), 10**400, [2.0]]
)
def test_what_is_no_finite_number(value):
    assert as_number(value) is None


def test_a_picture_is_short_and_on_one_line():
    for value in (np.zeros((9, 9)), "x" * 1000, "a\nb", [[1] * 50] * 50, {"k": "\ud800"}):
        picture = shown(value)
        assert "\n" not in picture
        assert len(picture) < 300
        picture.encode()
