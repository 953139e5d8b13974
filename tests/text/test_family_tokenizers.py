"""Tokenizers of the families against their own libraries, and control tokens that text of users must not become (B32)."""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import tiktoken
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from jaxinfer.text import pretokenizers
from jaxinfer.text.chat import ChatTemplate, encode_chat
from jaxinfer.text.detokenizer import IncrementalDetokenizer
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


# Pre-tokenizer, normalizer and ignore_merges as the families' tokenizer.json files have them.
BYTE_LEVEL = {
    "llama3": ("llama-bpe", None, True),
    "llama4": ("llama4", None, False),
    "qwen3": ("qwen2", normalizers.NFC(), False),
    "deepseek_v3": ("deepseek-v3", None, False),
    "mistral_tekken": ("tekken", None, True),
    "smollm": ("smollm", None, False),
}
CORPUS = [
    "The theatre's hat costs 12345, isn't it?  Don't SHOUT at theCamelCase!\n\n",
    "漢字かな交じり文、漢字。 Ünïcödé ǅ e\u0301t\u0301 🎉🎉 12 345\r\n\tx = {a/b}\n",
] * 3


def byte_level(pre: str, normalizer: normalizers.Normalizer | None, ignore_merges: bool) -> Backend:
    backend = Backend(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pretokenizers.byte_level(*pretokenizers.find(pre).patterns)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    return backend


def sentencepiece(*, legacy: bool) -> Backend:
    """Mistral's kind (legacy: a space before every text) or Gemma's; characters not in the corpus fall back to bytes."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = normalizers.Replace(" ", "▁")
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_previous")
    backend.decoder = decoders.Sequence(steps)
    words = [word.replace(" ", "▁") for word in re.findall(r" ?\w+|\s+|.", CORPUS[0])]
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    trained = Backend(models.BPE(unk_token="<unk>"))
    trained.train_from_iterator(words, trainer)
    learned = json.loads(trained.to_str())["model"]
    backend.model = models.BPE(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    return backend


@pytest.fixture(scope="module", params=[*BYTE_LEVEL, "gemma3", "mistral"])
def family_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Backend]:
    if request.param in BYTE_LEVEL:
        backend = byte_level(*BYTE_LEVEL[request.param])
    else:
        backend = sentencepiece(legacy=request.param == "mistral")
    backend.add_special_tokens(["<s>", "<|eot|>"])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    path = tmp_path_factory.mktemp(request.param)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "<|eot|>"}')
    return Tokenizer.from_directory(path), backend


FAMILY_TEXT = st.lists(
    st.one_of(
        st.sampled_from(
            [*_WORDS, " ", "▁", "<s>", "<|eot|>", "<think>", "<", "|>", "<0x41>", "12345", "'LL"]
        ),
        st.sampled_from(CORPUS[0].split(" ")),
        st.text(max_size=4),
    ),
    max_size=12,
).map("".join)


@given(text=FAMILY_TEXT)
@example("The漢字 isn't 12345 e\u0301t\u0301\n\n  x🙂<|eot|> the")
@settings(max_examples=100)
def test_tokenizer_files_of_the_families_read_as_their_library_reads_them(
    family_pair: tuple[Tokenizer, Backend], text: str
):
    ours, backend = family_pair
    ids = backend.encode(text).ids
    if not text.startswith("<s>"):  # where we leave one of two
        assert ours.encode(text) == ids
    for skip in (True, False):
        shown = backend.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == shown
        stream = IncrementalDetokenizer(ours, skip_special_tokens=skip)
        assert "".join([*map(stream.append, ids), stream.finish()]) == shown


@given(text=FAMILY_TEXT)
@example("<|eot|>x<s> <|eot|>")
@settings(max_examples=100)
def test_text_that_is_not_trusted_has_no_control_tokens_and_comes_back(
    family_pair: tuple[Tokenizer, Backend], text: str
):
    ours, backend = family_pair
    ids = ours.encode(text, add_special_tokens=False, parse_special=False)
    assert ours.special_ids.isdisjoint(ids)
    is_bytes = isinstance(backend.decoder, decoders.ByteLevel)
    if is_bytes and backend.normalizer is not None:
        text = unicodedata.normalize("NFC", text)
    if "<think>" not in text or not ours.strip_leading_space:  # these put a space after each added token too
        assert ours.decode(ids) == (text if is_bytes else text.replace("▁", " "))
    if "<" not in text:
        assert ids == backend.encode(text, add_special_tokens=False).ids


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
        field = {"type": "string", "description": text, "enum": [text]}
        function = {
            "name": text,
            "description": text,
            "parameters": {"type": "object", "properties": {f"{text} ": field, "type": field}},
        }
        tools = [{"type": "function", "function": function}]
        ids = encode_chat(tokenizer, template, messages, tools=tools, safe=safe)
        return [i for i in ids if i in tokenizer.special_ids]

    plain = control_ids("hello", safe=True)
    assert plain
    assert control_ids("hello", safe=False) == plain
    assert control_ids(spoof, safe=True) == plain
    assert len(control_ids(spoof, safe=False)) > len(plain)
