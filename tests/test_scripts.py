"""scripts/quickstart and scripts/test: which Python they pick, and how .venv is made, kept and mended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
BASH = shutil.which("bash") or "bash"

# A project that needs nothing from an index: its build backend is a file of its own.
PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "jaxinfer"
version = "1"
dependencies = [{dependencies}]
"""
BACKEND = """\
import pathlib, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name, info = "jaxinfer-1-py3-none-any.whl", "jaxinfer-1.dist-info"
    needs = [l.split('"')[1] for l in open("pyproject.toml") if l.startswith('dependencies = ["')]
    with zipfile.ZipFile(pathlib.Path(wheel_directory, name), "w") as wheel:
        wheel.writestr("jaxinfer.pth", str(pathlib.Path.cwd()))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\\nName: jaxinfer\\nVersion: 1\\n" + "".join(f"Requires-Dist: {n}\\n" for n in needs),
        )
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
RUN = "import os, sys\nprint(sys.argv[1:], 'PYTHONPATH' in os.environ)\n"


def fake_python(path: Path, version: tuple[int, int], *, lacks: str = "") -> Path:
    """An executable that is this Python, but for the version it reports and a module it lacks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    disguise = path.with_name(f"{path.name}-disguise.py")
    disguise.write_text(f"""\
import sys
sys.version_info = {(*version, 0, "final", 0)}
sys._base_executable = {str(path)!r}
if {lacks!r}:
    sys.modules[{lacks!r}] = None
exec(sys.argv[2])
""")
    path.write_text(f'#!{BASH}\nexec "{sys.executable}" "{disguise}" "$@"\n')
    path.chmod(0o755)
    return path


def shim_that_refuses(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{BASH}\necho 'pyenv: {path.name}: command not found' >&2\nexit 127\n")
    path.chmod(0o755)
    return path


def environment(tmp_path: Path, *path: Path, **more: str) -> dict[str, str]:
    """Only these folders on PATH, and a home with no pyenv in it."""
    (tmp_path / "home").mkdir(exist_ok=True)
    return {"PATH": ":".join(map(str, path)), "HOME": str(tmp_path / "home"), **more}


def find_python(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program = f'PATH={os.defpath} source "{SCRIPTS}/lib.sh"; find_python; printf %s "$PYTHON"'
    return subprocess.run(
        [BASH, "-euo", "pipefail", "-c", program], env=env, capture_output=True, text=True, check=False
    )


def test_lowest_version_that_runs_is_picked_past_shims_and_old_ones(tmp_path):
    shims, bin_ = tmp_path / "the shims", tmp_path / "bin"
    shim_that_refuses(shims / "python3.12")
    shim_that_refuses(shims / "python3")
    fake_python(bin_ / "python3", (3, 9))
    fake_python(bin_ / "python3.14", (3, 14))
    good = fake_python(bin_ / "python3.13", (3, 13))
    done = find_python(environment(tmp_path, shims, bin_))
    assert (done.returncode, done.stdout, done.stderr) == (0, str(good), "")


def test_pyenv_versions_are_looked_at_even_if_not_on_path(tmp_path):
    fake_python(tmp_path / "bin" / "python3.13", (3, 13))
    fake_python(tmp_path / "home/.pyenv/versions/3.10.1/bin/python", (3, 10))
    good = fake_python(tmp_path / "home/.pyenv/versions/3.12.7/bin/python", (3, 12))
    assert find_python(environment(tmp_path, tmp_path / "bin")).stdout == str(good)
    elsewhere = fake_python(tmp_path / "py env/versions/3.12.9/bin/python", (3, 12))
    assert find_python(environment(tmp_path, PYENV_ROOT=str(tmp_path / "py env"))).stdout == str(elsewhere)


def test_uv_is_asked(tmp_path):
    good = fake_python(tmp_path / "uv's" / "python", (3, 14))
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(f'#!{BASH}\n[ "$*" = "python find --system >=3.12" ] && echo "{good}"\n')
    uv.chmod(0o755)
    assert find_python(environment(tmp_path, tmp_path / "bin")).stdout == str(good)


def test_the_named_python_is_used_or_refused_but_not_replaced(tmp_path):
    fake_python(tmp_path / "bin" / "python3.12", (3, 12))
    named = fake_python(tmp_path / "my python", (3, 13))
    env = environment(tmp_path, tmp_path / "bin", JAXINFER_PYTHON=str(named))
    assert find_python(env).stdout == str(named)
    fake_python(named, (3, 11))
    done = find_python(env)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: JAXINFER_PYTHON={named} is not a CPython >= 3.12 that runs: set it to one, or unset it\n"
    )


def test_python_without_venv_is_the_last_choice_and_named(tmp_path):
    crippled = fake_python(tmp_path / "bin" / "python3.12", (3, 12), lacks="ensurepip")
    done = find_python(environment(tmp_path, tmp_path / "bin"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {crippled} cannot make virtual environments")
    assert "apt install python3.12-venv" in done.stderr
    good = fake_python(tmp_path / "bin" / "python3.14", (3, 14))
    assert find_python(environment(tmp_path, tmp_path / "bin")).stdout == str(good)


@pytest.mark.parametrize("script", ["quickstart", "test"])
def test_no_python_is_one_line(tmp_path, script):
    shutil.copytree(SCRIPTS, tmp_path / "clone" / "scripts")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "dirname").symlink_to(shutil.which("dirname") or "dirname")
    done = subprocess.run(
        [BASH, tmp_path / "clone" / "scripts" / script],
        env=environment(tmp_path, tools),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: no Python >= 3.12 found on PATH, in pyenv or in uv: install one (apt install"
    )
    assert not (tmp_path / "clone" / ".venv").exists()


def test_life_of_a_venv(tmp_path):
    clone, elsewhere = tmp_path / "a clone", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(SCRIPTS, clone / "scripts")
    (clone / "jaxinfer").mkdir()
    (clone / "jaxinfer" / "__init__.py").write_text("")
    (clone / "jaxinfer" / "run.py").write_text(RUN)
    (clone / "backend.py").write_text(BACKEND)
    venv, unfinished = clone / ".venv", clone / ".venv" / ".jaxinfer-unfinished"

    def quickstart(*args: str, dependencies: str = "") -> subprocess.CompletedProcess[str]:
        (clone / "pyproject.toml").write_text(PYPROJECT.format(dependencies=dependencies))
        env = {
            **os.environ,
            "JAXINFER_PYTHON": f"{sys.base_prefix}/bin/python3.{sys.version_info[1]}",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(elsewhere),
            "PYTHONPATH": "/nowhere",
            "VIRTUAL_ENV": "/nowhere",
        }
        return subprocess.run(
            [clone / "scripts" / "quickstart", *args],
            cwd=elsewhere,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    # A venv whose interpreter is gone (a Python that was upgraded away) is made anew. Then pip fails: its last
    # lines are shown and one of ours; no stamp is left, and the venv is not thrown away for it.
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to("/nowhere/python3")
    done = quickstart(dependencies='"jaxinfer-no-such-package"')
    assert done.returncode == 1
    assert "making .venv anew: its Python does not run" in done.stderr
    assert "No matching distribution found for jaxinfer-no-such-package" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: pip could not install jaxinfer")
    assert "run this again with a network" in done.stderr.splitlines()[-1]
    assert not unfinished.exists()

    # Mended: the same venv is filled and the command runs, with the caller's PYTHONPATH left out.
    done = quickstart()
    assert done.returncode == 0, done.stderr
    assert "making .venv" not in done.stderr
    assert "installing jaxinfer" in done.stderr
    default = [
        "--model",
        "smollm2-135m",
        "--prompt",
        "What is the capital of France?",
        "--max-tokens",
        "64",
    ]
    assert done.stdout == f"{default} False\n"

    # Again: nothing is installed. What the caller gives replaces the defaults.
    done = quickstart("--prompt=Hi")
    assert "installing" not in done.stderr
    assert done.stdout == f"{['--model', 'smollm2-135m', '--max-tokens', '64', '--prompt=Hi']} False\n"
    done = quickstart("--model", "m", "--input", "in.jsonl", "--output", "out.jsonl")
    assert done.stdout == f"{['--model', 'm', '--input', 'in.jsonl', '--output', 'out.jsonl']} False\n"

    # A run that was interrupted while it filled the venv leaves a mark, which condemns the venv.
    unfinished.touch()
    flaw = subprocess.run(
        [BASH, "-euo", "pipefail", "-c", f'source "{clone}/scripts/lib.sh"; venv_flaw'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert flaw.stdout == "an earlier run was interrupted while filling it\n"
