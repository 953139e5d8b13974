"""Writes what transformers renders of tests/text/templates (run with transformers 5.24 and jinja2; tests compare with it, and need neither).

python scripts/make_template_goldens.py [--templates DIR] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from pathlib import Path

from transformers.utils import chat_template_utils  # pyright: ignore[reportMissingImports] (not among our packages)

HERE = Path(__file__).parent.parent / "tests" / "text" / "templates"


class Today(datetime):
    """The day that the goldens are of."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 12, 1, 9, 30, tzinfo=tz)


def rendered(template: str, tokens: dict[str, str], case: dict) -> dict[str, str]:
    options = {"add_generation_prompt": True, **case.get("options", {})}
    if options.get("continue_final_message"):
        options["add_generation_prompt"] = False
    try:
        [text], _ = chat_template_utils.render_jinja_template(
            [case["messages"]], tools=case.get("tools"), chat_template=template, **options, **tokens
        )
    except Exception as error:
        return {"error": str(error)}
    return {"text": text}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--templates", type=Path, default=HERE)
    parser.add_argument("--output", type=Path, default=HERE / "goldens.json")
    args = parser.parse_args()
    chat_template_utils.datetime = Today
    listed = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
    goldens = {}
    for path in sorted(args.templates.glob("*.jinja")):
        tokens = listed["templates"].get(path.stem, {"bos_token": "<s>", "eos_token": "</s>"})
        source = path.read_text(encoding="utf-8")
        goldens[path.stem] = {name: rendered(source, tokens, case) for name, case in listed["cases"].items()}
    args.output.write_text(json.dumps(goldens, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
