"""Published configurations: all there, all read, and what is written of their sizes is up to date."""

from __future__ import annotations

import pytest

from jaxinfer.config.published import folder, published, published_config, published_sizes
from jaxinfer.errors import ConfigError
from jaxinfer.models.sizes import sizes_of_config


def test_every_one_has_its_sources_written_down():
    sources = (folder() / "models" / "SOURCES.md").read_text()
    assert [name for name in published() if f"| `{name}` |" not in sources] == []


@pytest.mark.parametrize("name", published())
def test_written_sizes_are_the_computed_ones(name: str):
    """If this fails, run scripts/model_sizes.py."""
    assert published_sizes()[name] == sizes_of_config(published_config(name))


def test_sizes_are_written_of_no_others():
    assert tuple(published_sizes()) == published()


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'llama-5'; there are: deepseek-v3, .*smollm2-135m"):
        published_config("llama-5")
