"""The Python face: open a model, generate, look inside."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, cast

import numpy as np

from jaxinfer.config.mesh import MeshConfig
from jaxinfer.config.processes import ProcessConfig
from jaxinfer.engine.build import build_engine
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import RequestOutput, SamplingParams, token_ids
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.media.item import MediaItem
from jaxinfer.media.registry import make_processor
from jaxinfer.models.params import param_specs
from jaxinfer.protocol.images import ImageOptions, fetch_all, image_urls, put_images, with_places
from jaxinfer.protocol.prompt import encode_text
from jaxinfer.protocol.text_params import tokenize_params
from jaxinfer.text.chat import ChatTemplate, encode_chat
from jaxinfer.values import as_integer, shown
from jaxinfer.weights.open import open_checkpoint

Prompt = str | Sequence[int] | np.ndarray
Message = Mapping[str, Any]


class LLM:
    """A model, ready to generate.

    Args:
      model: preset name, Hugging Face directory, .gguf file, or hub id.
      dtype: "float32" or "bfloat16"; None serves in the dtype the weights are stored in.
      weights: "packed" keeps matrices in the blocks of codes they are stored in (GGUF's Q4_0, Q4_1, Q8_0), "dense" spreads
        them out into `dtype`; "auto" packs where a kernel multiplies with them in place and no dtype is asked for.
      tp, pp, ep, dp: degrees of tensor, pipeline, expert and data parallelism.
      coordinator, num_processes, process_id: several processes, which all make the same LLM, share the devices; see
        jaxinfer.config.processes.ProcessConfig. Process 0 goes on; in the others LLM(…) does what that one asks for, and
        raises SystemExit when it ends.
      max_model_len: longest prompt and generation together, tokens; None: what the model was made for.
      engine_options: fields of jaxinfer.config.engine.EngineConfig.

    Attributes:
      engine: the engine itself, for callers that add and step requests on their own; with dp > 1 a ReplicatedEngine.
      params: the model's weights on the device, in the order of jaxinfer.models.params.param_specs.
      image_processor: makes what the tower takes from images; None as well.
      tower: the model's vision tower, None for models of text alone.
      start_seconds: what the phases of opening the model took.
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
        dp: int = 1,
        max_model_len: int | None = None,
        weights: str = "auto",
        coordinator: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        **engine_options: Any,
    ):
        parallel = MeshConfig(tp=tp, pp=pp, ep=ep, dp=dp)
        processes = ProcessConfig(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
        built = build_engine(
            model,
            dtype=dtype,
            weights=weights,
            max_model_len=max_model_len,
            parallel=parallel,
            processes=processes,
            **engine_options,
        )
        self.model_name = str(model)
        self.engine = cast("Engine", built.engine)  # a ReplicatedEngine has the same face
        self.model_config = built.model.config
        self.params = built.params
        self.tower = built.tower
        self.image_processor = make_processor(built.model.config, built.preprocessor)
        self.start_seconds = built.seconds
        self.tokenizer = built.tokenizer
        self.chat_template = None if built.tokenizer is None else ChatTemplate.from_tokenizer(built.tokenizer)
        self.generation_defaults = built.generation_defaults
        self.max_model_len = built.engine.config.max_model_len
        self.vocab_size = built.model.config.vocab_size
        self._teacher = built.teacher
        self._model, self._alone = built.model, not processes.several
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts: one text or list of token ids, or a list of them. Results are in the prompts' order.

        Args:
          sampling_params: for all prompts, or one for each; None: what the checkpoint recommends.
          cache_salt: prompts with different salts share no cached prefixes.

        Raises:
          RequestError: a prompt or parameter that is wrong; then none of the prompts is run.
        """
        several = _as_prompts(prompts)
        encoded = [encode_text(p, self.tokenizer) if isinstance(p, str) else p for p in several]
        texts = [p if isinstance(p, str) else None for p in several]
        return self._run(encoded, texts, sampling_params, cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them; template_options go to `jaxinfer.text.chat.encode_chat`.

        Images come as OpenAI's image_url parts, with data: URLs.
        """
        if self.tokenizer is None or self.chat_template is None:
            raise RequestError(f"{self.model_name} has no chat template: use generate()", param="messages")
        if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
            raise RequestError(
                f"messages must be a list of messages or a list of such lists, got {shown(messages)}",
                param="messages",
            )
        listed = list(messages)
        conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
        encoded, media = [], []
        options = ImageOptions(self.image_processor)
        for conversation in conversations:
            turns = with_places(conversation) if isinstance(conversation, list | tuple) else conversation
            ids = encode_chat(self.tokenizer, self.chat_template, turns, **template_options)
            items: tuple[MediaItem, ...] = ()
            if turns is not conversation and (urls := image_urls(conversation, options)):
                files = asyncio.run(fetch_all(urls, options.policy))
                ids, items = put_images(ids, files, self.tokenizer, options)
            encoded.append(ids)
            media.append(items)
        return self._run(encoded, [None] * len(encoded), sampling_params, None, media)

    def logits(
        self,
        token_ids: Sequence[int] | np.ndarray,
        pixel_values: np.ndarray | None = None,
        image_grid_thw: np.ndarray | None = None,
    ) -> np.ndarray:
        """Teacher-forced next-token logits of every position, float32 [T, V].

        Args:
          pixel_values: tiles [N, 3, size, size] (Llama 4) or patches [N, 3, patch, patch] (Kimi) of all images, one after the
            other; each placeholder among the tokens stands for a row that the vision tower makes of them.
          image_grid_thw: [images, 3] patches in time, height and width, for models that take images of any shape.
        """
        if pixel_values is None:
            return self._teacher.logits(token_ids)
        grids = None if image_grid_thw is None else np.asarray(image_grid_thw).tolist()
        if self.tower is None:
            raise RequestError(f"{self.model_name} takes no images", param="pixel_values")
        return self._teacher.logits(token_ids, self.tower.split(np.asarray(pixel_values), grids))

    def hidden_states(
        self, token_ids: Sequence[int] | np.ndarray, layers: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """Hidden states, float32 [T, D], by layer: 0 the embeddings, i the output of layer i, the last one normalised."""
        return self._teacher.hidden_states(token_ids, layers)

    def save(self, directory: str | Path) -> None:
        """Writes the weights as they are in memory, with the tokenizer, to a new directory that `LLM` and every command open.

        Opening it converts nothing, and gives each device its own slices, however many there are then. Its `dtype` and
        `weights` are what this model was opened with. Raises CheckpointError when the place is taken or cannot be written.
        """
        if not self._alone:
            raise ConfigError("saving needs all weights in one process: open the model without coordinator")
        from jaxinfer.weights.orbax import save_parameters  # takes a second to import

        specs = param_specs(self._model) + ([] if self.tower is None else param_specs(self.tower))
        save_parameters(Path(directory), specs, self.params, open_checkpoint(self.model_name))

    def _run(
        self,
        prompts: list[list[int]],
        texts: Sequence[str | None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str | None,
        media: Sequence[tuple[MediaItem, ...]] | None = None,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = SamplingParams(**_known_defaults(self.generation_defaults))
        each = [tokenize_params(p, self.tokenizer) for p in _one_for_each(sampling_params, len(prompts))]
        ids = [f"llm-{next(self._ids)}" for _ in prompts]
        done: dict[str, RequestOutput] = {}
        try:
            items = [()] * len(ids) if media is None else media
            for request_id, prompt, params, own in zip(ids, prompts, each, items, strict=True):
                self.engine.add_request(request_id, prompt, params, cache_salt=cache_salt, media=own)
            while len(done) < len(ids):
                done |= {out.request_id: out for out in self.engine.step() if out.finished}
        except BaseException:
            for request_id in ids:
                self.engine.abort_request(request_id)
            raise
        for request_id, text in zip(ids, texts, strict=True):
            done[request_id].prompt = text
        return [done[request_id] for request_id in ids]


def _as_prompts(prompts: object) -> list[str | list[int]]:
    """One prompt or several as a list of texts and lists of token ids."""
    to_list = getattr(prompts, "tolist", None)  # arrays
    items = prompts if to_list is None else to_list()
    if isinstance(items, str):
        return [items]
    if isinstance(items, bytes | Mapping | Set) or not isinstance(items, Iterable):
        raise RequestError(
            f"prompts must be a text, a list of token ids, or a list of those, got {shown(prompts)}",
            param="prompts",
        )
    items = list(items)
    if items and (as_integer(items[0]) is not None or not isinstance(items[0], Iterable)):
        return [token_ids(items, "prompts")]
    return [p if isinstance(p, str) else token_ids(p, f"prompts[{i}]") for i, p in enumerate(items)]


def _one_for_each(sampling_params: object, count: int) -> list[SamplingParams]:
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    several = list(sampling_params) if isinstance(sampling_params, list | tuple) else None
    if several is None or not all(isinstance(params, SamplingParams) for params in several):
        raise RequestError(
            f"sampling_params must be SamplingParams or a list of them, got {shown(sampling_params)}",
            param="sampling_params",
        )
    if len(several) != count:
        raise RequestError(f"{count} prompts, but {len(several)} sampling_params", param="sampling_params")
    return several


def _known_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: defaults[name] for name in names if defaults.get(name) is not None}
