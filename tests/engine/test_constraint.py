"""Grammars: what is generated has the form asked for, nobody else is affected, and what cannot be enforced is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from byte_tokenizer import EOS
from tiny_checkpoint import write_checkpoint

from jaxinfer import LLM, Constraint, SamplingParams
from jaxinfer.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(
        write_checkpoint(tmp_path_factory.mktemp("model")),
        warm_up=False,
        max_num_seqs=6,
        max_model_len=512,
        page_size=8,
        prefill_block=16,
        max_prefill_tokens=64,
    )


def sampled(seed: int, **options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "temperature": 1.0, "seed": seed, **options})


def test_every_text_has_its_form(llm: LLM):
    forms = [
        Constraint("json_schema", json.dumps(SCHEMA)),
        Constraint("regex", r"[0-9]{3}-[a-f]{2,4}"),
        Constraint("choice", '["yes", "no", "per\\"haps"]'),
        Constraint("grammar", 'start: "<" /[a-z]{1,5}/ ">"'),
        Constraint("grammar", 'root ::= "x" [0-9] "y"'),
    ]
    params = [sampled(seed, constraint=form) for seed in range(6) for form in forms]
    outputs = llm.generate([f"prompt {i}" for i in range(len(params))], params)
    for output, asked in zip(outputs, params, strict=True):
        [completion] = output.outputs
        assert completion.finish_reason == "stop", (asked.constraint, completion)
        text = completion.text
        match asked.constraint:
            case Constraint(kind="json_schema"):
                value = json.loads(text)
                assert set(value) <= {"name", "age", "tags"}
                assert len(value["name"]) <= 8
                assert 0 <= value["age"] <= 150
                assert set(value.get("tags", [])) <= {"a", "b"}
            case Constraint(kind="regex"):
                assert re.fullmatch(r"[0-9]{3}-[a-f]{2,4}", text)
            case Constraint(kind="choice"):
                assert text in ("yes", "no", 'per"haps')
            case Constraint(value=source):
                assert re.fullmatch("<[a-z]{1,5}>" if "start" in source else "x[0-9]y", text)
    texts = [o.outputs[0].text for o, p in zip(outputs, params, strict=True) if p.constraint == forms[1]]
    assert len(set(texts)) > 1


def test_any_json_object(llm: LLM):
    """Cut off by max_tokens it is still the beginning of one."""
    [output] = llm.generate(["x"], sampled(1, constraint=Constraint("json_object"), max_tokens=40))
    text = output.outputs[0].text
    assert text.lstrip().startswith("{")
    if output.outputs[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_others_and_later_ones_are_not_bound(llm: LLM):
    free = sampled(3, max_tokens=30)
    [alone] = llm.generate(["some text"], free)
    bound = sampled(3, constraint=Constraint("regex", "[ab]{30}"), max_tokens=30)
    for _ in range(2):  # slots change hands
        outputs = llm.generate(["some text"] * 8, [free, bound] * 4)
        for i, output in enumerate(outputs):
            if i % 2:
                assert re.fullmatch("[ab]{29,30}", output.outputs[0].text)
            else:
                assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_each_completion_has_a_place_of_its_own(llm: LLM):
    params = sampled(5, n=4, constraint=Constraint("regex", "[0-9]{2}x?[a-z]{3,9}"))
    [output] = llm.generate(["abc"], params)
    texts = [c.text for c in output.outputs]
    assert all(re.fullmatch("[0-9]{2}x?[a-z]{3,9}", text) for text in texts)
    assert len(set(texts)) > 1
    [again] = llm.generate(["abc"], params)
    assert [c.text for c in again.outputs] == texts


def test_pages_running_out_keeps_the_place(llm: LLM, tmp_path: Path):
    """Sequences are preempted and computed again; the form goes on where it was."""
    small = LLM(
        write_checkpoint(tmp_path),
        warm_up=False,
        max_num_seqs=6,
        max_model_len=128,
        page_size=8,
        prefill_block=16,
        max_prefill_tokens=64,
        num_pages=26,
    )
    params = [sampled(i, constraint=Constraint("regex", "(ab|cd){40}")) for i in range(6)]
    outputs = small.generate([f"p{i}" for i in range(6)], params)
    assert all(re.fullmatch("(ab|cd){40}", o.outputs[0].text) for o in outputs)
    expected = llm.generate([f"p{i}" for i in range(6)], params)
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in expected]


def test_other_rules_hold_too(llm: LLM):
    digits = Constraint("regex", "[0-9]{8}")
    [output] = llm.generate(["x"], sampled(1, constraint=digits, logit_bias={ord("7"): 100.0}))
    assert output.outputs[0].text == "77777777"
    [output] = llm.generate(["x"], sampled(1, constraint=digits, stop=["77"], logit_bias={ord("7"): 100.0}))
    assert output.outputs[0].text == ""
    # Nothing satisfies both: that request ends with an error, the engine goes on.
    impossible = sampled(1, constraint=digits, allowed_token_ids=[ord("a")])
    dead, fine = llm.generate(["x", "y"], [impossible, sampled(2, constraint=digits)])
    assert dead.outputs[0].finish_reason == "error"
    assert "no token was allowed" in (dead.error or "")
    assert re.fullmatch("[0-9]{8}", fine.outputs[0].text)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[1]", "is an object"),
        ("json_schema", '{"type": "text"}', "cannot be enforced"),
        ("json_schema", '{"unevaluatedProperties": false}', "unevaluatedProperties"),
        ("json_schema", '{"type": "string", "format": "no-such-format"}', "no-such-format"),
        ("json_schema", '{"type": "string", "pattern": "(["}', "cannot be enforced"),
        ("json_schema", '{"a":' * 70 + "1" + "}" * 70, "nested more than 64"),
        ("json_schema", '{"const": "a\\u0000b"}', "NUL"),
        ("regex", "(", "cannot be enforced"),
        ("regex", "a\0b", "NUL"),
        ("regex", "", "is empty"),
        ("regex", "a" * 300_000, "most allowed"),
        ("regex", "(a{1000}){1000}", "too many expressions"),
        ("grammar", "", "is empty"),
        ("grammar", "start: nowhere", "cannot be enforced"),
        ("choice", "[]", "non-empty texts"),
        ("choice", '["a", 5]', "non-empty texts"),
        ("yaml", "a", "is one of"),
    ],
)
def test_s10_s14_what_cannot_be_enforced_is_refused(llm: LLM, kind, value: str, says: str, unchecked):
    with pytest.raises(RequestError, match=re.escape(says)):
        llm.generate(["x"], sampled(1, constraint=Constraint(kind, value)))
    assert not llm.engine.has_unfinished_requests()


def test_a_form_needs_an_end_and_a_tokenizer(llm: LLM):
    with pytest.raises(RequestError, match="ignore_eos cannot go with"):
        SamplingParams(constraint=Constraint("json_object"), ignore_eos=True)
    bare = LLM("tiny-llama", warm_up=False, max_num_seqs=1, max_model_len=64)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        bare.generate([[1, 2]], SamplingParams(constraint=Constraint("json_object")))


def test_a_choice_is_any_of_thousands_of_any_characters(llm: LLM):
    options = ["a", "ab", "é日 🎉\u2028", '(.*)+[x]{3}^$|#&-~<>@"\\/', "\n\t\x7f", *map(str, range(5000))]
    compiler = llm.engine.grammars
    assert compiler is not None

    def allowed(ids: list[int]) -> set[int]:
        mask = compiler.compile(Constraint("choice", json.dumps(options))).mask(ids)
        return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())

    assert allowed([]) == {option.encode()[0] for option in options}
    for option in options[:8]:
        ids = list(option.encode())
        assert all(ids[i] in allowed(ids[:i]) for i in range(len(ids))), option
        assert EOS in allowed(ids)
    assert allowed(list(b"(")) == {ord(".")}


def test_s13_kept_grammars_are_bounded(llm: LLM):
    compiler = llm.engine.grammars
    assert compiler is not None
    for i in range(200):
        compiler.compile(Constraint("regex", f"a{{{i + 1}}}"))
    assert len(compiler._kept) <= 128
    first = compiler.compile(Constraint("regex", "ab"))
    bits = first.mask([])
    allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:260].nonzero()[0]
    assert allowed.tolist() == [ord("a")]
    assert np.unpackbits(first.mask([ord("a")]).view(np.uint8), bitorder="little").nonzero()[0].tolist() == [
        ord("b")
    ]


def test_a_grammar_that_grows_beyond_the_limits_is_named_as_the_reason(llm: LLM):
    doubling = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(25))  # 2 ** 25 times x
    form = Constraint("grammar", f'start: a0\n{doubling}\na25: "x"')
    [output] = llm.generate(["a"], sampled(1, constraint=form))
    assert output.outputs[0].finish_reason == "error"
    assert output.error is not None
    assert "too complex" in output.error
    [output] = llm.generate(["a"], sampled(1, max_tokens=2))
    assert output.outputs[0].finish_reason in ("stop", "length")
