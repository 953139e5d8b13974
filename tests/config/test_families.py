"""The table of families against the code and the documentation."""

from __future__ import annotations

from pathlib import Path

from jaxinfer.config.families import FAMILIES, markdown_table
from jaxinfer.config.published import published, published_config
from jaxinfer.models.registry import _FAMILIES


def test_the_documentation_has_the_same_table():
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    assert markdown_table() in text, f"put this table into docs/architecture.md:\n{markdown_table()}"


def test_every_registered_family_is_in_the_table_and_no_other():
    named = [kind for family in FAMILIES for kind in family.model_types]
    assert sorted(named) == sorted(_FAMILIES)


def test_every_family_has_a_published_model():
    kinds = {published_config(name)["model_type"] for name in published()}
    assert all(kinds & set(family.model_types) for family in FAMILIES)
