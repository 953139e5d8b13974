"""Images from a client's data URL to the vision tower: a tiny Kimi with a byte tokenizer behind a real socket."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from typing import Any

import numpy as np
import openai
import pytest
from byte_tokenizer import write_byte_tokenizer
from oracles import DIRECTORY
from PIL import Image
from scripted import ScriptedEngine, serving
from test_requests import call, refused
from tokenizers import AddedToken, Tokenizer

from jaxinfer import LLM, SamplingParams
from jaxinfer.config.server import ServerConfig
from jaxinfer.media.images import ImageLimits, decode_image
from jaxinfer.serve import served_model

IMAGE_TOKEN = 310
NAMED = ServerConfig(served_model_name="kimi")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|media_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("kimi")
    shutil.copytree(DIRECTORY / "kimi_k25", folder, dirs_exist_ok=True)
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    count = tokenizer.get_vocab_size()
    fill = [f"<|unused_{i}|>" for i in range(IMAGE_TOKEN - count)]
    tokenizer.add_special_tokens(
        [AddedToken(s, special=True, normalized=False) for s in [*fill, "<|media_pad|>"]]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    options: dict[str, Any] = {"page_size": 4, "prefill_block": 8, "max_prefill_tokens": 64}
    return LLM(folder, dtype="float32", warm_up=False, max_num_seqs=4, max_media_tokens=64, **options)


@pytest.fixture(scope="module")
def server(llm: LLM):
    limits = {"max_images": 3, "max_image_bytes": 4096, "max_image_pixels": 5000}
    with serving(llm.engine, served_model(llm, NAMED), **limits) as server:
        yield server


def png(seed: int, width: int = 24, height: int = 16) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def part(data: bytes) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()},
    }


def messages(*images: bytes, text: str = "What is it?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(part, images), {"type": "text", "text": text}]}]


def body(*images: bytes, **fields: Any) -> dict[str, Any]:
    return {
        "model": "kimi",
        "messages": messages(*images),
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def test_the_answer_is_the_model_s_for_these_pixels(server, llm: LLM):
    data = png(0)
    status, answer, _ = call(server, "/v1/chat/completions", body(data, return_token_ids=True))
    assert status == 200, answer
    assert llm.image_processor is not None
    item = llm.image_processor(decode_image(data, ImageLimits())).item
    prompt = answer["prompt_token_ids"]
    assert prompt.count(IMAGE_TOKEN) == item.num_tokens == 6  # 24 x 16 pixels: 6 x 4 patches, four a row
    ids = list(prompt)
    for token in tokens_of(answer):
        logits = llm.logits(ids, item.pixel_values, np.array([item.grid_thw]))[-1]
        assert token == logits.argmax()
        ids.append(token)


def test_openai_s_client_streaming_and_python_agree(server, llm: LLM):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    extra = {"ignore_eos": True}
    options: dict[str, Any] = {"model": "kimi", "max_tokens": 6, "temperature": 0, "extra_body": extra}
    chat: Any = messages(png(1), png(2, 8, 8))
    whole = client.chat.completions.create(messages=chat, **options)
    stream = client.chat.completions.create(messages=chat, stream=True, **options)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    [output] = llm_chat(llm, chat)
    assert output.outputs[0].text == whole.choices[0].message.content
    item = {"type": "input_image", "image_url": chat[0]["content"][0]["image_url"]["url"]}
    second = {"type": "input_image", "image_url": chat[0]["content"][1]["image_url"]["url"]}
    content: Any = [
        {"role": "user", "content": [item, second, {"type": "input_text", "text": "What is it?"}]}
    ]
    response = client.responses.create(
        model="kimi", input=content, max_output_tokens=6, temperature=0, extra_body=extra
    )
    assert response.output_text == whole.choices[0].message.content


def llm_chat(llm: LLM, chat: list[dict[str, Any]]) -> list[Any]:
    """The same in Python, on an engine of its own: the server's thread owns the first."""
    other = LLM(
        llm.model_name,
        dtype="float32",
        warm_up=False,
        max_num_seqs=2,
        page_size=4,
        prefill_block=8,
        max_prefill_tokens=64,
    )
    return other.chat(chat, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))


def test_images_are_part_of_the_cache_s_key(server):
    """S22: equal tokens, another image."""

    def ask(data: bytes) -> tuple[list[int], int]:
        status, answer, _ = call(server, "/v1/chat/completions", body(data, return_token_ids=True))
        assert status == 200, answer
        return tokens_of(answer), answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    first, cached = ask(png(10))
    assert cached == 0
    again, cached = ask(png(10))
    assert again == first
    assert cached > 20
    _, cached = ask(png(11))
    assert cached == 0


@pytest.mark.parametrize(
    ("images", "says"),
    [
        ([png(0)] * 4, "the messages hold 4 images, the most allowed is 3"),
        ([png(0, 100, 100)], "larger than 4096 bytes"),
        ([b"GIF89a nothing"], "cannot be decoded|is not a"),
    ],
)
def test_limits(server, images: list[bytes], says: str):
    error = refused(server, "/v1/chat/completions", body(*images))
    assert error["param"] == "messages"
    assert re.search(says, error["message"])


def test_more_pixels_than_allowed(server):
    flat = io.BytesIO()
    Image.new("RGB", (100, 100)).save(flat, "PNG")
    error = refused(server, "/v1/chat/completions", body(flat.getvalue()))
    assert "100 x 100 has more than the 5000 pixels" in error["message"]


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/x.png", "https://example.com/x.png", "file:///etc/hostname", "ftp://x/y", "x.png", ""],
)
def test_nothing_is_fetched_unless_allowed(server, url: str):
    """S16, S18."""
    sent = body()
    sent["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": {"url": url}})
    error = refused(server, "/v1/chat/completions", sent)
    assert "data:" in error["message"]


def test_private_addresses_stay_out_of_reach_when_fetching_is_allowed(llm: LLM):
    with serving(ScriptedEngine(), served_model(llm, NAMED), allow_image_urls=True) as server:
        for url in (
            f"{server.url}/health",
            "http://169.254.169.254/latest/meta-data",
            "http://localhost:1/x.png",
        ):
            sent = body()
            sent["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": {"url": url}})
            error = refused(server, "/v1/chat/completions", sent)
            assert re.search("not public|cannot be fetched", error["message"])


def test_text_that_spells_a_placeholder_is_refused(server):
    sent = body(png(0))
    sent["messages"][0]["content"][1]["text"] = "<|media_pad|> and more"
    error = refused(server, "/v1/chat/completions", sent)
    assert "2 places for images" in error["message"]


def test_a_text_model_takes_no_images(serve):
    server = serve(ScriptedEngine())
    error = refused(server, "/v1/chat/completions", {**body(png(0)), "model": None})
    assert "takes no images" in error["message"]
