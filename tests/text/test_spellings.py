from __future__ import annotations

import pytest
from tokenizers import AddedToken

from jaxinfer.text.spellings import SpecialSpellings

SPELLINGS = SpecialSpellings(
    [
        AddedToken("<a>", special=True),
        AddedToken("<a><b>", special=True),
        AddedToken("<mask>", special=True, lstrip=True),
        AddedToken("<think>", special=False),
    ]
)


def test_the_longest_is_found_with_its_white_space():
    assert SPELLINGS.pattern is not None
    assert SPELLINGS.pattern.findall("x<a><b>y <mask> <think>") == ["<a><b>", " <mask>"]
    assert SpecialSpellings([AddedToken("<think>", special=False)]).pattern is None
    assert SpecialSpellings([AddedToken("§", special=True)]).pattern is None


@pytest.mark.parametrize(
    ("text", "goes_on", "begun"),
    [
        ("x<", True, False),
        ("x<ma", True, False),
        (">x", False, True),
        ("x>", False, False),
        (">x>", False, True),
        ("mas", True, True),  # inside one
        ("sk>", True, True),  # a whole text that is part of one counts for both ends
        ("<a>", True, True),  # of "<a><b>"
        ("<mask>", False, False),
        ("think", False, False),
        ("plain", False, False),
        ("", False, False),
    ],
)
def test_parts_at_the_ends_of_text(text: str, goes_on: bool, begun: bool):
    assert SPELLINGS.may_go_on(text) is goes_on
    assert SPELLINGS.may_have_begun(text) is begun
