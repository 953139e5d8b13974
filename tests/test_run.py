"""`python -m jaxinfer.run` as a shell sees it, on a tiny model with random weights and a byte tokenizer."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from byte_tokenizer import write_byte_tokenizer

from jaxinfer.errors import ConfigError
from jaxinfer.run import main

ROOT = Path(__file__).parents[1]
SMALL = ("--dtype", "float32", "--max-model-len", 96, "--max-num-seqs", 4)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    """A Hugging Face directory: the recorded tiny Llama 3, a byte tokenizer, a generation_config."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(ROOT / "tests/oracles/llama3" / name, folder / name)
    write_byte_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "max_new_tokens": 3}))
    return folder


def start(*args: object, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxinfer.run", *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def run(*args: object, stdin: str | None = None) -> tuple[int, str, str]:
    process = start(*args, stdin=subprocess.PIPE)
    out, err = process.communicate(stdin, timeout=300)
    assert "Traceback" not in err
    return process.returncode, out, err


def write_lines(path: Path, items) -> Path:
    path.write_bytes(b"".join((i if isinstance(i, bytes) else json.dumps(i).encode()) + b"\n" for i in items))
    return path


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("", "--model is required"),
        ("--model m", "--prompt or --input is required"),
        ("--prompt x", "--model is required"),
        ("--promt x", "unknown argument --promt, did you mean --prompt?"),
        ("--model m --prompt x --temprature=2", "unknown argument --temprature, did you mean --temperature?"),
        ("--model m --prompt x --max 3", "unknown argument --max"),
        ("--model m --prompt x y", "unknown argument y"),
        ("--model m --prompt -hi", "(one that begins with - is written --prompt=-"),
        ("--model m --prompt x --input f", "not allowed with argument --prompt"),
        ("--model m --input f", "--input needs --output"),
        ("--model m --prompt x --output f", "--output needs --input"),
        ("--model m --prompt x --raw --system s", "--system and --raw exclude each other"),
        ("--model m --input f --output g --json", "--json needs --prompt"),
        ("--model m --input f --output g --raw", "--raw needs --prompt"),
        ("--model m --prompt x --max-tokens many", "invalid int value: 'many'"),
        ("--model m --prompt x --dtype int3", "invalid choice: 'int3'"),
    ],
)
def test_a_usage_error_is_one_line(args, says, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(args.split())
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert says in err
    assert err.endswith("; see 'jaxinfer run --help'\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--prompt", "x", "--temperature", "9"], "temperature must be at most 2"),
        (["--prompt", "x", "--temperature", "nan"], "temperature must be a finite number"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--prompt", "x", "--n", "3"], "n=3 needs sampling"),
        (["--prompt", "x", "--stop", ""], "stop[0] must not be empty"),
        (["--input", "IN", "--output", "OUT", "--top-p", "0"], "top_p must be more than 0"),
        (["--input", "missing.jsonl", "--output", "OUT"], "cannot read missing.jsonl"),
        (["--input", ".", "--output", "OUT"], "cannot read ."),
        (["--input", "IN", "--output", "no/folder/out"], "cannot write no/folder/out"),
        (["--input", "IN", "--output", "IN"], "are the same file"),
        (["--input", "IN", "--output", "THEIRS"], "THEIRS holds something else"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_a_model_is_loaded(
    args, says, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "IN").write_text('{"prompt": "x"}\n')
    (tmp_path / "THEIRS").write_text("my notes\n")
    assert main(["--model", "no-such-model", *args]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1
    assert out == ""
    assert (tmp_path / "IN").read_text() == '{"prompt": "x"}\n'
    assert {path.name for path in tmp_path.iterdir()} == {"IN", "THEIRS"}


def test_a_usage_error_imports_no_jax():
    program = (
        "import sys\nfrom jaxinfer import run\n"
        "code = run.main(['--model', 'm', '--prompt', 'x', '--temperature', '9'])\n"
        "sys.exit(code if 'jax' not in sys.modules else 70)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--model", "no-such-model"), "no model 'no-such-model'"),
        (("--model", ""), "the model name is empty"),
        (("--model", "tiny-llama", "--max-num-seqs", "0"), "max_num_seqs must be at least 1, got 0"),
        (("--model", "tiny-llama", "--max-model-len", "0"), "max_model_len must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_loaded_is_one_line_and_leaves_no_files(args, says, tmp_path, capsys):
    source, target = write_lines(tmp_path / "in", [{"prompt": [1]}]), tmp_path / "out"
    for work in (["--prompt", "x"], ["--input", str(source), "--output", str(target)]):
        assert main([*args, *work]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        *loading, error = err.splitlines()
        assert loading == ([f"loading {args[1]}"] if "--input" in work else [])
        assert error.startswith("error: ")
        assert says in error
    assert list(tmp_path.iterdir()) == [source]


def test_a_model_without_a_tokenizer(tmp_path, capsys):
    assert main(["--model", "tiny-llama", "--prompt", "hi", "--max-model-len", "64"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: tiny-llama has no tokenizer")
    assert "--input" in err
    assert err.count("\n") == 1

    body = {"prompt": [[1, 2, 3], [4]], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    source = write_lines(
        tmp_path / "in",
        [
            {"prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True},
            {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body},
            {"prompt": "text"},
        ],
    )
    target = tmp_path / "out"
    small = ["--max-model-len", "64", "--max-num-seqs", "2"]
    assert main(["--model", "tiny-llama", "--input", str(source), "--output", str(target), *small]) == 1
    plain, openai, text = map(json.loads, target.read_bytes().splitlines())
    assert (plain["text"], len(plain["token_ids"])) == ("", 3)
    choices = openai["response"]["body"]["choices"]
    assert choices[0]["token_ids"] == plain["token_ids"][:2]
    assert [(c["text"], len(c["token_ids"])) for c in choices] == [("", 2)] * 2
    assert text["error"]["param"] == "prompt"


def test_n_completions_do_not_all_run_at_once(monkeypatch):
    asked = []

    def load(args, **options):
        asked.append(options["max_num_seqs"])
        raise ConfigError("the test needs no model")

    monkeypatch.setattr("jaxinfer.run._load", load)
    for n in ("1", "3", "1024"):
        assert main(["--model", "m", "--prompt", "x", "--n", n, "--temperature", "1"]) == 2
    assert asked == [1, 3, 64]


def test_a_prompt(tiny_model):
    code, out, err = run("--model", tiny_model, "--prompt", "hello", "--raw", "--max-tokens", 8, *SMALL)
    assert (code, err) == (0, "")
    code, shown, err = run(
        "--model", tiny_model, "--prompt", "hello", "--raw", "--max-tokens", 8, "--json", *SMALL
    )
    assert (code, err) == (0, "")
    result = json.loads(shown)
    assert out == result["text"] + "\n" * (not result["text"].endswith("\n"))
    assert result["prompt_token_ids"] == list(b"hello")
    assert result["token_ids"]
    assert len(result["token_ids"]) == result["usage"]["completion_tokens"] <= 8
    assert result["finish_reason"] in ("stop", "length")
    assert set(result["timing"]) == {"load_s", "first_token_s", "generate_s", "tokens_per_s"}


def test_a_prompt_is_a_user_s_turn_where_the_model_has_a_chat_template(tiny_model):
    code, out, _ = run("--model", tiny_model, "--prompt", "hello", "--max-tokens", 2, "--json", *SMALL)
    assert code == 0
    expected = [257, *b"user\nhello", 258, 10, 257, *b"assistant\n"]
    assert json.loads(out)["prompt_token_ids"] == expected


def test_a_chat_with_several_completions(tiny_model):
    args = ("--system", "s", "--n", 2, "--temperature", 1, "--seed", 5, "--max-tokens", 4, "--json")
    code, out, _ = run("--model", tiny_model, "--prompt", "hi", *args, *SMALL)
    result = json.loads(out)
    assert code == 0
    expected = [257, *b"system\ns", 258, 10, 257, *b"user\nhi", 258, 10, 257, *b"assistant\n"]
    assert result["prompt_token_ids"] == expected
    assert len(result["completions"]) == 2
    assert result["completions"][0]["token_ids"] != result["completions"][1]["token_ids"]


def test_a_file_of_good_and_bad_lines(tiny_model, tmp_path):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    source = write_lines(
        tmp_path / "in.jsonl",
        [
            {"prompt": "hello", "max_tokens": 6},
            b"not json",
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "x", **chat},
            },
            {"prompt": "x" * 96},
            {"prompt": "hello", "max_tokens": 6, "logprobs": 1},
            {"prompt": "hello"},
            b"",
        ],
    )
    target = tmp_path / "out.jsonl"
    code, out, err = run(
        "--model", tiny_model, "--input", source, "--output", target, "--max-tokens", 2, *SMALL
    )
    assert (code, out) == (1, "")
    loading, *_, last = err.splitlines()
    assert loading == f"loading {tiny_model}"
    assert last.startswith("finished: 6/6 lines, 2 failed")
    first, broken, answered, long, scored, short = map(json.loads, target.read_bytes().splitlines())
    assert broken["error"]["code"] == "invalid_json"
    assert long["error"]["code"] == "context_length_exceeded"
    assert (answered["custom_id"], answered["error"]) == ("a", None)
    assert answered["response"]["body"]["usage"]["completion_tokens"] <= 5
    assert first["token_ids"] == scored["token_ids"]  # greedy, whatever generation_config says
    assert len(scored["logprobs"]["token_logprobs"]) == len(scored["token_ids"])
    assert short["token_ids"] == first["token_ids"][:2]


def test_interrupted_killed_and_resumed_gives_the_same_bytes(tiny_model, tmp_path):
    items = [{"prompt": f"line {i}", "max_tokens": 10 + 37 * i % 50, "ignore_eos": True} for i in range(40)]
    source = write_lines(tmp_path / "in.jsonl", [*items, b"bad"])
    target = tmp_path / "out.jsonl"
    common = ("--model", tiny_model, *SMALL)

    sizes = [0]
    for sign, expected in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = start(*common, "--input", source, "--output", target)
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and process.poll() is None:
            if target.exists() and target.stat().st_size > sizes[-1] + 500:
                break
            time.sleep(0.005)
        process.send_signal(sign)
        _, err = process.communicate(timeout=200)
        assert process.returncode == expected, err
        assert "Traceback" not in err
        sizes.append(target.stat().st_size)
    assert 0 < sizes[1] < sizes[2]

    code, _, err = run(*common, "--input", source, "--output", target)
    assert code == 1
    assert "kept from an earlier run" in err
    code, whole, _ = run(*common, "--input", "-", "--output", "-", stdin=source.read_text())
    assert code == 1
    assert target.read_text() == whole
    assert [json.loads(line)["line"] for line in whole.splitlines()] == list(range(1, 42))
    assert sizes[2] < len(whole.encode())
    assert not (tmp_path / "out.jsonl.journal").exists()
