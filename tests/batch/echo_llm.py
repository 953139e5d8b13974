"""A model without weights, with the interface of jaxinfer.LLM: it says the prompt backwards, then ends.

As a program it runs a batch with it: `python echo_llm.py INPUT OUTPUT [seconds a step]`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

from jaxinfer.engine.request import CompletionOutput, RequestOutput, SamplingParams, TokenLogprob
from jaxinfer.errors import RequestError
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer

TOKENIZER = byte_tokenizer()


class EchoEngine:
    """Each step gives one token to each of the first `max_num_seqs` requests that wait.

    A prompt with byte 0 in it fails after its first token, as one with NaN logits does.
    """

    def __init__(self, max_num_seqs: int = 16, step_seconds: float = 0.0):
        self.max_num_seqs = max_num_seqs
        self.step_seconds = step_seconds
        self.running: dict[str, tuple[RequestOutput, SamplingParams]] = {}
        self.most_running = 0
        self.aborted: list[str] = []

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        media: Any = (),
    ) -> None:
        if request_id in self.running:
            raise RequestError(f"request id {request_id} is in use")
        if params.allowed_token_ids is not None:
            raise RequestError("this engine cannot restrict tokens", param="allowed_token_ids")
        completions = [CompletionOutput(i) for i in range(params.n)]
        self.running[request_id] = (RequestOutput(request_id, prompt_token_ids, completions), params)
        self.most_running = max(self.most_running, len(self.running))

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def abort_request(self, request_id: str) -> None:
        self.running.pop(request_id)
        self.aborted.append(request_id)

    def step(self) -> list[RequestOutput]:
        time.sleep(self.step_seconds)
        stepped = list(self.running.values())[: self.max_num_seqs]
        for output, params in stepped:
            for completion in output.outputs:
                self._advance(output, completion, params)
            output.finished = output.outputs[0].finish_reason is not None
            if output.finished:
                del self.running[output.request_id]
        return [output for output, _ in stepped]

    @staticmethod
    def _advance(output: RequestOutput, completion: CompletionOutput, params: SamplingParams) -> None:
        made = len(completion.token_ids)
        prompt = output.prompt_token_ids
        token = prompt[-1 - made] if made < len(prompt) else EOS
        completion.token_ids.append(token)
        if params.logprobs is not None:
            completion.logprobs = [TokenLogprob(i, -1.0) for i in completion.token_ids]
        completion.text = bytes(i for i in completion.token_ids if i < 256).decode(errors="replace")
        if 0 in prompt:
            completion.finish_reason, output.error = "error", "logits are NaN"
        elif token == EOS:
            completion.finish_reason = "stop"
        elif len(completion.token_ids) == params.max_tokens:
            completion.finish_reason = "length"


class EchoLLM:
    model_name = "echo"
    vocab_size = VOCAB_SIZE
    image_processor = None
    max_model_len = 100

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None = TOKENIZER,
        generation_defaults: Mapping[str, Any] | None = None,
        **engine_options,
    ):
        self.tokenizer = tokenizer
        self.chat_template = None if tokenizer is None else ChatTemplate.from_tokenizer(tokenizer)
        self.generation_defaults = generation_defaults or {}
        self.engine = EchoEngine(**engine_options)


def main(source: str, target: str, step_seconds: str = "0") -> None:
    from jaxinfer.batch.lines import read_lines
    from jaxinfer.batch.output import OrderedOutput
    from jaxinfer.batch.runner import run_batch

    output = OrderedOutput(Path(target))
    with open(source, "rb") as lines:
        llm = EchoLLM(step_seconds=float(step_seconds))
        run_batch(llm, read_lines(lines), output, max_in_flight=8)
    output.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
