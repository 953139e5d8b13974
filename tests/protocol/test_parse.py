from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.errors import RequestError
from jaxinfer.protocol.parse import parse_chat_request, parse_completion_request, parse_plain_request
from jaxinfer.protocol.request import ChatPrompt
from jaxinfer.protocol.sampling import model_defaults

USER = {"role": "user", "content": "hello"}


def chat(**fields):
    return parse_chat_request({"model": "m", "messages": [USER], **fields})


def chat_prompt(**fields) -> ChatPrompt:
    prompt = chat(**fields).chat
    assert prompt is not None
    return prompt


def completion(**fields):
    return parse_completion_request({"model": "m", "prompt": "hello", **fields})


def refusal(parse, **fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert "\n" not in str(caught.value)
    return caught.value


def test_openai_defaults():
    assert completion().sampling.max_tokens == 16
    assert chat().sampling.max_tokens is None
    for request in (completion(), chat()):
        assert (request.sampling.temperature, request.sampling.top_p, request.sampling.n) == (1.0, 1.0, 1)


def test_request_beats_server_defaults_which_beat_openai():
    defaults = model_defaults(
        {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 50, "eos_token_id": 3, "top_k": None}
    )
    body = {"prompt": "x", "temperature": 0.1, "top_p": None}
    sampling = parse_completion_request(body, defaults).sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.top_k) == (0.1, 0.9, 50, 0)


@pytest.mark.parametrize("defaults", [{}, {"max_tokens": 7}])
def test_max_completion_tokens_beats_max_tokens(defaults):
    body = {"messages": [USER], "max_tokens": 5, "max_completion_tokens": 3}
    assert parse_chat_request(body, defaults).sampling.max_tokens == 3
    assert (
        parse_chat_request({"messages": [USER], "max_completion_tokens": 3}, defaults).sampling.max_tokens
        == 3
    )


def test_every_sampling_field_arrives():
    request = completion(
        max_tokens=9,
        min_tokens=2,
        n=2,
        temperature=0.5,
        top_p=0.8,
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"5": -100},
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=1,
        bad_words=["no"],
        allowed_token_ids=[1, 2],
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        priority=-3,
        cache_salt="tenant",
        user="u",
        return_token_ids=True,
    )
    s = request.sampling
    assert (s.max_tokens, s.min_tokens, s.n, s.temperature, s.top_p, s.top_k, s.min_p) == (
        9,
        2,
        2,
        0.5,
        0.8,
        0,
        0.1,
    )
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1, -1, 1.2)
    assert (s.logit_bias, s.seed, s.stop, s.stop_token_ids) == ({5: -100}, None, ("a", "b"), (4,))
    assert (s.ignore_eos, s.logprobs, s.prompt_logprobs, s.allowed_token_ids) == (True, 3, 1, (1, 2))
    assert (s.skip_special_tokens, s.include_stop_str_in_output) == (False, True)
    assert (s.bad_words, request.priority, request.cache_salt) == (("no",), -3, "tenant")
    assert (request.user, request.return_token_ids, request.prompt_logprobs) == ("u", True, True)


# What other servers answered with a 500 or took for something else (B17, B18, B21).
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", "2"),
        ("n", True),
        ("n", 0),
        ("max_tokens", 0),
        ("max_tokens", 1.0),
        ("max_tokens", "16"),
        ("max_completion_tokens", 0),
        ("min_tokens", 17),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", 1e400),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
        ("seed", 2**63),
        ("seed", "7"),
        ("stop", 5),
        ("stop", ""),
        ("stop[1]", ["a", 5]),
        ("stop", ["a"] * 17),
        ("stop_token_ids[0]", [-1]),
        ("stop_token_ids[0]", ["1"]),
        ("stop_token_ids", 5),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": "2"}),
        ("logit_bias", {"1": float("inf")}),
        ("logit_bias", [1]),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", "x"),
        ("bad_words", "no"),
        ("bad_words", [" "]),
        ("allowed_token_ids", []),
        ("ignore_eos", 1),
        ("skip_special_tokens", "false"),
        ("echo", "yes"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("model", 5),
        ("user", 5),
        ("priority", 1.5),
        ("priority", 2**63),
        ("cache_salt", ""),
        ("cache_salt", "a/b"),
        ("cache_salt", "x" * 129),
        ("prompt", None),
        ("prompt", 5),
        ("prompt", {}),
        ("prompt", []),
        ("prompt", [1, "a"]),
        ("prompt", [[1], [True]]),
        ("prompt", ["x"] * 1025),
        ("best_of", 2),
        ("suffix", "tail"),
        ("guided_json", {"type": "object"}),
        ("guided_whatever_comes", "x"),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs.pattern", {"pattern": "a"}),
        ("use_beam_search", True),
        ("use_beam_search", 0),
        ("cache_salt", "a" * 128 + "\n"),
        ("logit_bias", {"5\n": 1}),
        ("logit_bias", {"5": 100.5}),
        ("bad_words[0]", [""]),
        ("response_format.type", {"type": 5}),
        ("structured_outputs.choice", {"choice": []}),
        ("truncate_prompt_tokens", 5),
    ],
)
def test_a_bad_completion_field_is_named(field, value):
    assert refusal(completion, **{field.split(".")[0].split("[")[0]: value}).param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", None),
        ("messages", {}),
        ("messages", "hello"),
        ("messages", []),
        ("messages[1]", [USER, "hello"]),
        ("messages[0].role", [{"content": "x"}]),
        ("messages[0].role", [{"role": 5, "content": "x"}]),
        ("messages[0].content", [{"role": "user"}]),
        ("messages[1].content", [USER, {"role": "assistant", "tool_calls": []}]),
        ("messages[0].content", [{"role": "user", "content": 5}]),
        ("messages[0].content", [{"role": "user", "content": {"text": "x"}}]),
        ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
        (
            "messages[0].content[0].image_url.url",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        ),
        (
            "messages[0].content[0].type",
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        ),
        ("messages[0].content[0]", [{"role": "user", "content": ["x"]}]),
        ("messages[0].tool_calls", [{"role": "assistant", "tool_calls": {}}]),
    ],
)
def test_a_bad_message_is_named(field, value):
    assert refusal(chat, messages=value).param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 5),
        ("top_logprobs", "5"),
        ("top_logprobs", 5),
        ("tools", []),
        ("tools[0].function", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("tools[0].function.name", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools[0].function.name", [{"type": "function", "function": {}}]),
        ("tools[0].function.name", [{"type": "function", "function": {"name": "f\n"}}]),
        ("tools[0].function.parameters", [{"type": "function", "function": {"name": "f", "parameters": []}}]),
        ("tools[0].type", [{"type": "web_search"}]),
        ("tool_choice", "sometimes"),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
        ("tools", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]),
        ("response_format.json_schema", {"type": "json_schema"}),
        ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"schema": []}}),
        ("response_format.type", {"type": "yaml"}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("logits_processors", ["x"]),
        ("echo", True),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", []),
        ("add_generation_prompt", "no"),
        ("reasoning_effort", 3),
    ],
)
def test_a_bad_or_unsupported_chat_field_is_named(field, value):
    error = refusal(chat, **{field.split(".")[0].split("[")[0]: value})
    assert error.param == field


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_a_body_that_is_no_object(body):
    with pytest.raises(RequestError, match="must be a JSON object"):
        parse_chat_request(body)


def test_fields_that_ask_for_nothing_pass():
    chat(
        tools=None,
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        best_of=1,
        frobnicate=3,
        metadata={"a": "b"},
        top_logprobs=0,
    )
    completion(suffix="", use_beam_search=False, best_of=2, n=2)


@pytest.mark.parametrize(
    "content", ["", None, [], [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]]
)
def test_empty_null_and_part_contents_are_accepted(content):
    assert chat_prompt(messages=[{"role": "user", "content": content}]).messages[0]["content"] == content


def test_a_turn_of_tool_calls_needs_no_content():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for turn in (
        {"role": "assistant", "tool_calls": calls, "content": None},
        {"role": "assistant", "tool_calls": calls},
    ):
        assert chat_prompt(messages=[USER, turn]).messages[1] == turn


def test_chat_logprobs():
    assert chat().sampling.logprobs is None
    assert chat(logprobs=False).sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).sampling.logprobs == 5


def test_echo_with_logprobs_asks_for_the_prompts_too_but_does_not_show_them_twice():
    request = completion(echo=True, logprobs=2)
    assert (request.sampling.prompt_logprobs, request.prompt_logprobs, request.echo) == (2, False, True)
    assert completion(echo=True).sampling.prompt_logprobs is None


def test_prompt_shapes():
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1, 2], [3]]).prompts == ((1, 2), (3,))
    assert completion(prompt=["a", [3]]).prompts == ("a", (3,))


def test_continuing_the_last_message():
    messages = [USER, {"role": "assistant", "content": "He"}]
    prompt = chat_prompt(messages=messages, continue_final_message=True)
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    assert (
        refusal(chat, continue_final_message=True, add_generation_prompt=True).param
        == "continue_final_message"
    )


def test_template_variables():
    prompt = chat_prompt(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert prompt.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}


def test_stream_options():
    request = chat(stream=True, stream_options={"include_usage": True})
    assert (request.stream, request.include_usage, request.continuous_usage_stats) == (True, True, False)
    error = refusal(chat, stream=True, stream_options={"include_usage": 1})
    assert error.param == "stream_options.include_usage"


def test_plain_lines_choose_their_endpoint():
    assert parse_plain_request({"prompt": "a", "temperature": 0}).endpoint == "completions"
    assert parse_plain_request({"prompt": [1, 2]}).prompts == ((1, 2),)
    assert parse_plain_request({"messages": [USER]}).endpoint == "chat"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": "a", "temprature": 1}, "unknown field 'temprature', did you mean 'temperature'\\?"),
        ({"prompt": "a", "zzz": 1}, "unknown field 'zzz'$"),
        ({"messages": [USER], "echo": True}, "echo is not supported"),
        ({"messages": [USER], "echo": False}, "unknown field 'echo'"),
        ({"prompt": "a", "messages": [USER]}, "not both"),
        ({"prompt": ["a", "b"]}, "one line a prompt"),
        ({"temperature": 1}, "needs prompt or messages"),
        ({}, "needs prompt or messages"),
        ({"prompt": "a", "logits_processors": ["x"]}, "logits_processors is not supported"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_plain_lines_refuse_what_they_do_not_know(line, says):
    with pytest.raises(RequestError, match=says):
        parse_plain_request(line)


_values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers() | st.text())
)
_names = st.sampled_from(
    [
        "temperature",
        "top_p",
        "top_k",
        "n",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "logit_bias",
        "seed",
        "logprobs",
        "echo",
        "prompt",
        "messages",
        "bad_words",
        "priority",
        "cache_salt",
        "stream_options",
        "chat_template_kwargs",
        "tools",
        "top_logprobs",
        "best_of",
    ]
)


@given(st.dictionaries(_names, _values | st.dictionaries(st.text(), _values, max_size=2), max_size=5))
def test_whatever_the_types_only_request_errors_come_out(body):
    before = copy.deepcopy(body)
    named = {*body, "prompt", "messages"}
    for parse in (parse_chat_request, parse_completion_request, parse_plain_request):
        param: str | None = None
        try:
            parse(body)
        except RequestError as error:
            param = error.param
        assert param is None or param.split(".")[0].split("[")[0] in named
    assert repr(body) == repr(before)


def test_model_defaults_are_request_fields_and_stay_so():
    config = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "eos_token_id": 2, "top_p": None}
    defaults = model_defaults(config)
    assert defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert model_defaults(defaults) == defaults
    assert parse_chat_request({"messages": [USER]}, defaults).sampling.max_tokens == 99
