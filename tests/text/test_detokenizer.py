from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from jaxinfer.text.detokenizer import IncrementalDetokenizer
from jaxinfer.text.tokenizer import Tokenizer

# Ids of the real vocabulary, a few outside it, and many of the single bytes that make invalid UTF-8.
IDS = st.lists(
    st.one_of(st.integers(0, 49151), st.integers(17, 300), st.sampled_from([-1, 49152, 2**40])), max_size=30
)


def run(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.append(i) for i in ids), detokenizer.finish()]


def spell(tokenizer: Tokenizer, text: str, cuts: list[int]) -> list[int]:
    """Token ids of a text that is cut at some places before it is encoded, so that tokens fall differently."""
    edges = [0, *sorted({c % (len(text) + 1) for c in cuts}), len(text)]
    return [i for a, b in pairwise(edges) for i in tokenizer.encode(text[a:b], parse_special=False)]


@given(ids=IDS, skip=st.booleans())
@settings(max_examples=400)
@example(ids=[2, 0, 1], skip=True)
def test_pieces_join_to_the_decoded_text(smollm2: Tokenizer, ids: list[int], skip: bool):
    detokenizer = IncrementalDetokenizer(smollm2, skip_special_tokens=skip)
    deltas = run(detokenizer, ids)
    assert "".join(deltas) == detokenizer.text == smollm2.decode(ids, skip_special_tokens=skip)
    assert detokenizer.finish() == ""


@pytest.fixture(scope="module")
def every_byte(byte_level_backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary with a token for each of the 256 bytes (the real one lacks some)."""
    path = tmp_path_factory.mktemp("every_byte")
    byte_level_backend.save(str(path / "tokenizer.json"))
    return Tokenizer.from_directory(path)


# The bytes at which UTF-8's rules change.
EDGES = st.lists(
    st.sampled_from(b"A\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc2\xdf\xe0\xe1\xed\xef\xf0\xf1\xf4\xf5\xff"),
    max_size=12,
)


@given(data=st.one_of(st.binary(max_size=12), EDGES.map(bytes)))
@settings(max_examples=400)
@example(data=b"\xe0\x80")
@example(data=b"\xf0\x9f\x98")
@example(data=b"\xe6\xadA")
def test_broken_characters_show_as_they_do_when_decoded_whole(every_byte: Tokenizer, data: bytes):
    ids = {every_byte.token_bytes(i): i for i in range(every_byte.vocab_size)}
    deltas = run(IncrementalDetokenizer(every_byte), [ids[bytes([b])] for b in data])
    assert "".join(deltas) == data.decode("utf-8", errors="replace")


def test_a_character_in_several_tokens_comes_whole(smollm2: Tokenizer):
    ids = smollm2.encode("歪")
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer(smollm2)
    assert run(detokenizer, ids) == [*[""] * (len(ids) - 1), "歪", ""]


def test_an_unfinished_character_becomes_one_replacement_at_the_end(smollm2: Tokenizer):
    ids = smollm2.encode("a🙂")
    detokenizer = IncrementalDetokenizer(smollm2)
    assert [detokenizer.append(i) for i in ids[:-1]] == ["a", *[""] * (len(ids) - 2)]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.text == "a\ufffd"


def test_an_unfinished_character_shows_when_other_text_follows(smollm2: Tokenizer):
    broken = smollm2.encode("漢")[:-1]
    control, letter = 2, smollm2.encode("x")[0]
    detokenizer = IncrementalDetokenizer(smollm2)
    assert run(detokenizer, [*broken, control, letter]) == [*[""] * len(broken), "", "\ufffdx", ""]


def test_stop_string_over_many_tokens_never_leaks(smollm2: Tokenizer):
    ids = [i for part in ("ABC", "DEF", "G", "HI", "J", "KL") for i in smollm2.encode(part)]
    detokenizer = IncrementalDetokenizer(smollm2, stop=("DEFGHIJ",))
    assert "".join(run(detokenizer, ids)) == "ABC"
    assert detokenizer.stopped == "DEFGHIJ"


def test_what_was_held_back_comes_when_the_text_goes_on_differently(smollm2: Tokenizer):
    a, d, e, f, x = (smollm2.encode(c)[0] for c in "adefx")
    detokenizer = IncrementalDetokenizer(smollm2, stop=("def",))
    assert [detokenizer.append(i) for i in (a, d, e)] == ["a", "", ""]
    assert detokenizer.append(x) == "dex"
    assert [detokenizer.append(i) for i in (d, e)] == ["", ""]
    assert detokenizer.finish() == "de"
    assert detokenizer.stopped is None
    assert detokenizer.append(f) == "f"


def test_include_stop_keeps_the_string_and_nothing_after_it(smollm2: Tokenizer):
    ids = smollm2.encode("one two three")
    detokenizer = IncrementalDetokenizer(smollm2, stop=("tw",), include_stop=True)
    assert "".join(run(detokenizer, ids)) == "one tw"
    assert detokenizer.stopped == "tw"
    assert detokenizer.append(ids[0]) == ""


@pytest.mark.parametrize(
    ("text", "stop", "shown", "stopped"),
    [
        ("xabcd", ("abcd", "bc"), "xa", "bc"),  # complete first
        ("xabc", ("bc", "abc"), "x", "abc"),  # complete at once: the longest
        ("aab", ("ab",), "a", "ab"),
        ("é漢end", ("漢",), "é", "漢"),
        ("abab", ("abac", "bb"), "abab", None),
    ],
)
def test_which_of_several_stop_strings_wins(
    smollm2: Tokenizer, text: str, stop: tuple[str, ...], shown: str, stopped: str | None
):
    for ids in (smollm2.encode(text), [i for char in text for i in smollm2.encode(char)]):
        detokenizer = IncrementalDetokenizer(smollm2, stop=stop)
        assert "".join(run(detokenizer, ids)) == shown
        assert detokenizer.stopped == stopped


@given(
    text=st.text("abé漢 ", max_size=24),
    stop=st.lists(st.text("abé漢 ", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=12),
    include=st.booleans(),
)
@settings(max_examples=500)
def test_stop_strings_for_every_cut_of_the_text(
    smollm2: Tokenizer, text: str, stop: list[str], cuts: list[int], include: bool
):
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    end, start, first = min(ends, default=(len(text), len(text), None))
    detokenizer = IncrementalDetokenizer(smollm2, stop=tuple(stop), include_stop=include)
    shown, produced = "", ""
    for i in spell(smollm2, text, cuts):
        produced += smollm2.token_text(i) if "\ufffd" not in smollm2.token_text(i) else ""
        shown += detokenizer.append(i)
        assert text[: end if include else start].startswith(shown)
    if detokenizer.stopped is None:
        assert len(shown) >= len(produced) - max(map(len, stop)) + 1
    shown += detokenizer.finish()
    assert shown == detokenizer.text == text[: end if include else start]
    assert detokenizer.stopped == first


def test_stop_strings_are_each_requests_own(smollm2: Tokenizer):
    ids = smollm2.encode("red green blue")
    first = IncrementalDetokenizer(smollm2, stop=(" green",))
    second = IncrementalDetokenizer(smollm2, stop=(" blue",))
    for i in ids:
        first.append(i)
        second.append(i)
    assert (first.text, second.text) == ("red", "red green")


def test_stop_strings_count_only_after_min_tokens(smollm2: Tokenizer):
    ids = [smollm2.encode(c)[0] for c in "abxab"]
    detokenizer = IncrementalDetokenizer(smollm2, stop=("ab",), min_tokens=1)
    assert [detokenizer.append(i) for i in ids[:3]] == ["a", "b", "x"]
    assert "".join(run(detokenizer, ids[3:])) == ""
    assert detokenizer.text == "abx"


def test_ids_outside_the_vocabulary_add_nothing(smollm2: Tokenizer):
    detokenizer = IncrementalDetokenizer(smollm2, stop=("zz",))
    first, *rest = smollm2.encode("漢")
    assert "".join(run(detokenizer, [-5, first, 10**9, *rest, 49152])) == "漢"


def test_leading_space_goes_only_where_the_text_begins(sentencepiece_backend, save):
    tokenizer = Tokenizer.from_directory(save(sentencepiece_backend("legacy")))
    bos, *ids = tokenizer.encode("the cat")
    assert bos == 1
    assert "".join(run(IncrementalDetokenizer(tokenizer), ids)) == "the cat" == tokenizer.decode(ids)
    assert "".join(run(IncrementalDetokenizer(tokenizer, prompt_ids=[bos]), ids)) == "the cat"
    assert "".join(run(IncrementalDetokenizer(tokenizer, prompt_ids=[bos, *ids]), ids)) == " the cat"
    kept = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert (
        "".join(run(kept, [bos, *ids]))
        == "<s> the cat"
        == tokenizer.decode([bos, *ids], skip_special_tokens=False)
    )


def test_a_stop_string_takes_no_more_memory_than_its_length(smollm2: Tokenizer):
    """Its beginnings written out would be 2 GB here."""
    stop = "the end " * 8000
    tracemalloc.start()
    try:
        detokenizer = IncrementalDetokenizer(smollm2, stop=(stop, stop[1:]))
        shown = "".join(run(detokenizer, smollm2.encode("In the end the end " + "the end" * 3)))
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert shown == "In the end the end " + "the end" * 3
    assert used < 2**21
