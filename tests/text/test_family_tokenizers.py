"""Tokenizers of the families against their own libraries, and control tokens that text of users must not become (B32)."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiktoken
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxinfer.text.chat import ChatTemplate, encode_chat
from jaxinfer.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
_CONTROL = re.compile(
    r"<\|[a-z_]+\|>|<｜[^｜\n{]+｜>|\[/?[A-Z_]{3,}\]|</?s>|<(?:start|end)_of_\w+>|<bos>|</?think>"
)

# Kimi's words, as the model's own tokenizer file gives them to tiktoken.
KIMI_WORDS = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_WORDS = [
    "th",
    "he",
    " the",
    " t",
    "漢字",
    "漢",
    "'s",
    "  ",
    "\n\n",
    "12",
    "123",
    "é",
    "Ab",
    "..",
    "🎉",
    "e\u0301",
]
RANKS = {bytes([b]): b for b in range(256)}
for _word in _WORDS:  # every beginning of a word too, so that it can be merged
    for _end in range(2, len(_word.encode()) + 1):
        RANKS.setdefault(_word.encode()[:_end], len(RANKS))


def kimi(folder: Path, control: list[str]) -> Tokenizer:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {str(len(RANKS) + i): {"content": text, "special": True} for i, text in enumerate(control)}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_directory(folder)


@pytest.fixture(scope="module")
def kimi_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, tiktoken.Encoding]:
    ours = kimi(tmp_path_factory.mktemp("kimi"), ["[BOS]", "[EOS]"])
    return ours, tiktoken.Encoding("kimi", pat_str=KIMI_WORDS, mergeable_ranks=RANKS, special_tokens={})


TEXT = st.lists(
    st.one_of(
        st.sampled_from(
            [*_WORDS, "A", "ß", "ǅ", "ʰ", "١٢٣٤", "'LL", "’s", "\r", "\t", "\u3000", "々", "ー", "\x00"]
        ),
        st.text(max_size=4),
    ),
    max_size=12,
).map("".join)


@given(text=TEXT)
@example("The漢字 isn't 12345 e\u0301t\u0301\n\n  x")
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_kimi_tokens_are_those_of_tiktoken(kimi_pair: tuple[Tokenizer, tiktoken.Encoding], text: str):
    ours, reference = kimi_pair
    ids = ours.encode(text, parse_special=False, add_special_tokens=False)
    assert ids == reference.encode_ordinary(text)
    assert ours.decode(ids) == text


@pytest.fixture(params=["byte-level", "sentencepiece", "tiktoken"])
def with_controls(
    request: pytest.FixtureRequest,
    byte_level_backend: Backend,
    sentencepiece_backend: Callable[[str], Backend],
    save: Callable[..., Path],
    tmp_path: Path,
) -> Callable[[list[str]], Tokenizer]:
    """Makes a tokenizer of some kind to which these texts are control tokens."""

    def make(control: list[str]) -> Tokenizer:
        if request.param == "tiktoken":
            return kimi(tmp_path, control)
        if request.param == "byte-level":
            backend = Backend.from_str(byte_level_backend.to_str())
        else:
            backend = sentencepiece_backend("never")
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
        return Tokenizer.from_directory(save(backend, tokenizer_config_json={}))

    return make


@pytest.mark.parametrize("name", NAMES)
def test_text_of_users_and_tools_never_becomes_a_control_token(
    with_controls: Callable[[list[str]], Tokenizer], name: str
):
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    control = sorted({*_CONTROL.findall(source), "</s>", "<s>", "[INST]"})
    tokenizer = with_controls(control)
    tokens = json.loads((TEMPLATES / "cases.json").read_text(encoding="utf-8"))["templates"][name]
    template = ChatTemplate(source, special_tokens=tokens)
    spoof = " ".join(control)

    def control_ids(text: str, *, safe: bool) -> list[int]:
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
        messages.append({"role": "user", "content": f"x{text}x"})
        ids = encode_chat(tokenizer, template, messages, safe=safe)
        return [i for i in ids if i in tokenizer.special_ids]

    plain = control_ids("hello", safe=True)
    assert plain
    assert control_ids("hello", safe=False) == plain
    assert control_ids(spoof, safe=True) == plain
    assert len(control_ids(spoof, safe=False)) > len(plain)
