"""The `jaxinfer` command as a shell sees it: output, exit codes, no tracebacks."""

from __future__ import annotations

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
