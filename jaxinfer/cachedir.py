"""Where jaxinfer keeps files between starts."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_root() -> Path:
    """The user's cache folder for jaxinfer, or $JAXINFER_CACHE."""
    return Path(os.environ.get("JAXINFER_CACHE") or platformdirs.user_cache_dir("jaxinfer")).expanduser()
