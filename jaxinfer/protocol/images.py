"""Images in a chat: found in its messages, read, and put where the chat template has placed them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.errors import RequestError
from jaxinfer.media.fetch import FetchPolicy, fetch
from jaxinfer.media.images import ImageLimits, decode_image
from jaxinfer.media.item import MediaItem
from jaxinfer.media.processor import ImageProcessor, expand_placeholders
from jaxinfer.text.tokenizer import Tokenizer

IMAGE_PARTS = ("image_url", "input_image")
_PLACE = {"type": "image"}  # what chat templates look for


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How images are taken.

    Attributes:
      processor: the model's; None: it takes none.
      max_images: in one request.
    """

    processor: ImageProcessor | None = None
    limits: ImageLimits = field(default_factory=ImageLimits)
    policy: FetchPolicy = field(default_factory=FetchPolicy)
    max_images: int = 32


def image_urls(messages: Iterable[Any], options: ImageOptions) -> list[str]:
    """URLs of all images in messages, in order. RequestError for more than are allowed, or where none are.

    What is no message or no part is left for the chat template's own checks.
    """
    urls = [_url(part) for message in messages for part in _parts(message) if _is_image(part)]
    if urls and options.processor is None:
        raise RequestError(
            "this model takes no images: send text alone", param="messages", code="unsupported_content"
        )
    if len(urls) > options.max_images:
        raise RequestError(
            f"the messages hold {len(urls)} images, the most allowed is {options.max_images}",
            param="messages",
        )
    return urls


def with_places(messages: Iterable[Any]) -> list[Any]:
    """The messages with a place for each image instead of its URL."""
    return [
        {**message, "content": [_PLACE if _is_image(part) else part for part in _parts(message)]}
        if any(_is_image(part) for part in _parts(message))
        else message
        for message in messages
    ]


async def fetch_all(urls: Sequence[str], policy: FetchPolicy) -> list[bytes]:
    """The files behind URLs, at once; the first that fails ends the others. Raises RequestError as `fetch` does."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(fetch(url, policy)) for url in urls]
    except* RequestError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def put_images(
    token_ids: list[int], files: Sequence[bytes], tokenizer: Tokenizer, options: ImageOptions
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """A rendered chat with each image's tokens in its place, and what the vision tower takes.

    Raises RequestError for a file that is no image within the limits, and for a template that places fewer images.
    """
    processor = options.processor
    assert processor is not None  # image_urls has checked it
    images = [processor(decode_image(data, options.limits)) for data in files]
    spellings = {spelling for image in images for spelling in image.tokens} | {processor.PLACEHOLDER}
    ids = {spelling: _control_token(tokenizer, spelling) for spelling in spellings}
    tokens = [[ids[spelling] for spelling in image.tokens] for image in images]
    expanded = expand_placeholders(token_ids, ids[processor.PLACEHOLDER], tokens)
    return expanded, tuple(image.item for image in images)


def _control_token(tokenizer: Tokenizer, spelling: str) -> int:
    found = tokenizer.encode(spelling, add_special_tokens=False)
    if len(found) != 1:
        raise RequestError(
            f"this model's tokenizer does not know {spelling!r}, which images need: send text alone",
            param="messages",
        )
    return found[0]


def _parts(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def _url(part: Mapping[str, Any]) -> str:
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise RequestError("an image_url part needs a url: a data: URL", param="messages")
    return url
