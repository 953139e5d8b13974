"""The pre-tokenizers a GGUF file names: how text is cut into words before byte-level BPE.

Each regex is the model publisher's own, from its tokenizer.json or tokenizer code (Oniguruma syntax, as
`tokenizers` reads it); the names and which of them share a regex are llama.cpp's.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from jaxinfer.errors import CheckpointError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words(digits: str) -> str:
    """The family of Llama 3 and Qwen: contractions, words with one leading sign, numbers, signs, spaces."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, *, contraction: str, without: str = "", tail: str = r"[\r\n/]*") -> str:
    """The family of GPT-4o: a word is capitals and then small letters, so camelCase is cut."""
    upper, lower, lead = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]", r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{tail}|{_SPACES}"
    )


# Letters with a case, as DeepSeek-LLM's tokenizer.json lists them: code points, for some of these characters do not
# survive an editor that normalises Unicode.
_DEEPSEEK_LLM_SPANS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A "
    "38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF "
    "1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D "
    "1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 "
    "1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F "
    "2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F "
    "A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_LLM_LETTERS = "".join(
    "-".join(chr(int(end, 16)) for end in span.split("-")) for span in _DEEPSEEK_LLM_SPANS.split()
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One pre-tokenizer and the habits of the models that use it."""

    patterns: tuple[str, ...]  # each cuts the pieces the one before it left
    ignore_merges: bool = False  # a word that is itself a token is taken whole
    add_bos: bool = False  # where the file does not say


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),))
_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_GPT4O = PreTokenizer((_cased_words(r"\p{N}{1,3}", contraction=f"{_CONTRACTION}?"),))

KIMI_K2_PATTERN = "[\\p{Han}]+|" + _cased_words(
    r"\p{N}{1,3}", contraction=f"{_CONTRACTION}?", without=r"&&[^\p{Han}]", tail=r"[\r\n]*"
)

_BY_NAME: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LLM_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}+",
        )
    ),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        )
    ),
    "kimi-k2": PreTokenizer((KIMI_K2_PATTERN,)),
    "tekken": PreTokenizer((_cased_words(r"\p{N}", contraction=""),), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}


def byte_level(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Cuts text by each regex in turn and spells the pieces in the byte-level alphabet."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def find(name: str | None) -> PreTokenizer:
    """The pre-tokenizer that `tokenizer.ggml.pre` names.

    A wrong guess would give wrong token ids and quietly bad text, so CheckpointError names an unknown one.
    """
    if name is None:
        raise CheckpointError(
            "the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre): convert it anew with a current llama.cpp"
        )
    if name not in _BY_NAME:
        raise CheckpointError(
            f"GGUF pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; known: {', '.join(sorted(_BY_NAME))}"
        )
    return _BY_NAME[name]
