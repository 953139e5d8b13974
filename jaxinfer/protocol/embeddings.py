"""Bodies of /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxinfer.protocol.convert import read, read_object
from jaxinfer.protocol.parse import read_texts_or_ids
from jaxinfer.protocol.types import EmbeddingBody
from jaxinfer.protocol.unsupported import EMBEDDINGS, refuse_unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """What to embed, and how hidden states become one vector.

    Attributes:
      inputs: texts or token ids.
      base64: vectors as base64 of little-endian float32, not as numbers.
      pooling: "mean" of all tokens' final hidden states, or that of the "last".
      normalize: to length 1, as OpenAI's are.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    base64: bool = False
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    model: str | None = None


def parse_embedding_request(body: Any) -> EmbeddingRequest:
    """Raises RequestError naming the field."""
    refuse_unsupported(read_object(body), EMBEDDINGS)
    fields = read(body, EmbeddingBody)
    return EmbeddingRequest(
        inputs=read_texts_or_ids(fields.input, "input"),
        base64=fields.encoding_format == "base64",
        pooling=fields.pooling or "mean",
        normalize=fields.normalize is not False,
        model=fields.model,
    )


def pool(hidden: np.ndarray, request: EmbeddingRequest) -> np.ndarray:
    """One vector, float32 [D], of a text's final hidden states [T, D]."""
    vector = hidden.mean(axis=0) if request.pooling == "mean" else hidden[-1]
    length = float(np.linalg.norm(vector))
    return (vector / length if request.normalize and length > 0 else vector).astype(np.float32)


def embedding_response(
    request: EmbeddingRequest, vectors: Sequence[np.ndarray], prompt_tokens: int, *, model: str
) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": _shown(vector, request.base64)}
            for i, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
    }


def _shown(vector: np.ndarray, as_base64: bool) -> str | list[float]:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()
