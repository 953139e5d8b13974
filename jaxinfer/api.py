"""The Python face: open a model, generate, look inside."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.engine.build import build_engine
from jaxinfer.engine.request import RequestOutput, SamplingParams
from jaxinfer.engine.teacher import TeacherForcing
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.text.chat import ChatTemplate, encode_chat

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model, ready to generate.

    Args:
      model: preset name, Hugging Face directory, .gguf file, or hub id.
      dtype: "float32" or "bfloat16"; None serves in the dtype the weights are stored in.
      tp, pp, ep: degrees of tensor, pipeline and expert parallelism.
      max_model_len: longest prompt and generation together, tokens; None: what the model was made for.
      engine_options: fields of jaxinfer.config.engine.EngineConfig.

    Attributes:
      engine: the engine itself, for callers that add and step requests on their own.
      tokenizer, chat_template: None for checkpoints that have none.
      generation_defaults: sampling settings that the checkpoint recommends.
    """

    def __init__(
        self,
        model: str | Path,
        dtype: str | None = None,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        max_model_len: int | None = None,
        **engine_options: Any,
    ):
        if (tp, pp, ep) != (1, 1, 1):
            raise ConfigError(f"tp={tp}, pp={pp}, ep={ep}: parallelism is not there yet, only 1 works")
        built = build_engine(model, dtype=dtype, max_model_len=max_model_len, **engine_options)
        self.model_name = str(model)
        self.engine = built.engine
        self.model_config = built.model.config
        self.tokenizer = built.tokenizer
        self.chat_template = None if built.tokenizer is None else ChatTemplate.from_tokenizer(built.tokenizer)
        self.generation_defaults = built.generation_defaults
        self.max_model_len = built.engine.config.max_model_len
        self.vocab_size = built.model.config.vocab_size
        self._teacher = TeacherForcing(built.model, built.params, built.cache_spec, self.max_model_len)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts: one string or list of token ids, or a list of them. Results are in the prompts' order.

        sampling_params: for all prompts, or one for each.
        """
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            prompts = [prompts]  # type: ignore[list-item]
        encoded = [self._encode(prompt) for prompt in prompts]  # type: ignore[arg-type]
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        return self._run(encoded, texts, sampling_params, cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them; template_options go to `jaxinfer.text.chat.encode_chat`."""
        if self.tokenizer is None or self.chat_template is None:
            raise ConfigError(f"{self.model_name} has no chat template: use generate()")
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Sequence[Sequence[Message]] = [messages] if one else messages  # type: ignore[assignment]
        encoded = [
            encode_chat(self.tokenizer, self.chat_template, c, **template_options) for c in conversations
        ]
        return self._run(encoded, [None] * len(encoded), sampling_params, None)

    def logits(
        self,
        token_ids: Sequence[int],
        pixel_values: np.ndarray | None = None,
        image_grid_thw: np.ndarray | None = None,
    ) -> np.ndarray:
        """Teacher-forced next-token logits of every position, float32 [T, V]."""
        if pixel_values is not None or image_grid_thw is not None:
            raise RequestError(f"{self.model_name} takes no images", param="pixel_values")
        return self._teacher.logits(token_ids)

    def hidden_states(self, token_ids: Sequence[int], layers: Sequence[int]) -> dict[int, np.ndarray]:
        """Hidden states, float32 [T, D], by layer: 0 the embeddings, i the output of layer i, the last one normalised."""
        return self._teacher.hidden_states(token_ids, layers)

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ConfigError(f"{self.model_name} has no tokenizer: give token ids instead of text")
        return self.tokenizer.encode(prompt)

    def _run(
        self,
        prompts: list[list[int]],
        texts: Sequence[str | None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str | None,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = SamplingParams(**_known_defaults(self.generation_defaults))
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but {len(sampling_params)} sampling_params")
        ids = [f"llm-{next(self._ids)}" for _ in prompts]
        done: dict[str, RequestOutput] = {}
        try:
            for request_id, prompt, params in zip(ids, prompts, sampling_params, strict=True):
                self.engine.add_request(request_id, prompt, params, cache_salt=cache_salt)
            while len(done) < len(ids):
                done |= {out.request_id: out for out in self.engine.step() if out.finished}
        except BaseException:
            for request_id in ids:
                self.engine.abort_request(request_id)
            raise
        for request_id, text in zip(ids, texts, strict=True):
            done[request_id].prompt = text
        return [done[request_id] for request_id in ids]


def _known_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: defaults[name] for name in names if defaults.get(name) is not None}
