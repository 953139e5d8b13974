#!/usr/bin/env python
"""Writes configs/sizes.json anew: the sizes of the models in configs/models, computed from the declarations of their parameters.

python scripts/model_sizes.py
"""

from __future__ import annotations

import json

from jaxinfer.config.published import folder, published, published_config
from jaxinfer.models.sizes import sizes_of_config


def main() -> None:
    sizes = {name: sizes_of_config(published_config(name)).as_json() for name in published()}
    (folder() / "sizes.json").write_text(json.dumps(sizes, indent=2) + "\n")


if __name__ == "__main__":
    main()
