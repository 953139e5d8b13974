"""Writes what transformers renders of tests/text/templates (run with transformers 5.24 and jinja2; tests compare with it, and need neither).

python scripts/make_template_goldens.py [--templates DIR] [--output FILE] [--kimi FILE]
"""

from __future__ import annotations

import argparse
import json
import runpy
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


def declare_tools(module: Path, cases: dict[str, dict]) -> None:
    """Fills in what Kimi K2.5's own module makes of tools; null where it refuses them."""
    encode = runpy.run_path(str(module))["encode_tools_to_typescript_style"]
    for case in cases.values():
        try:
            case["text"] = encode(json.loads(json.dumps(case["tools"], sort_keys=True)))
        except Exception:
            case["text"] = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--templates", type=Path, default=HERE)
    parser.add_argument("--output", type=Path, default=HERE / "goldens.json")
    parser.add_argument("--kimi", type=Path, help="tool_declaration_ts.py of Kimi K2.5: for kimi_tools.json")
    args = parser.parse_args()
    chat_template_utils.datetime = Today
    listed = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
    goldens = {}
    for path in sorted(args.templates.glob("*.jinja")):
        tokens = listed["templates"].get(path.stem, {"bos_token": "<s>", "eos_token": "</s>"})
        source = path.read_text(encoding="utf-8")
        goldens[path.stem] = {name: rendered(source, tokens, case) for name, case in listed["cases"].items()}
    write(args.output, goldens)
    if args.kimi is not None:
        cases = json.loads((HERE / "kimi_tools.json").read_text(encoding="utf-8"))
        declare_tools(args.kimi, cases)
        write(HERE / "kimi_tools.json", cases)


def write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
