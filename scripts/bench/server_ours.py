"""Benchmark server: jaxinfer's own, around an engine that recites. Arguments: model (.gguf, for its tokenizer), seconds a step.

Prints its port; at the end of its input, the times of its steps as JSON. Everything but the model is real: detokenising, events, sockets.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from jaxinfer.config.server import ServerConfig
from jaxinfer.engine.completion import Completion, RequestState
from jaxinfer.engine.request import CompletionOutput, EngineLoad, RequestOutput, SamplingParams
from jaxinfer.engine.service import EngineService
from jaxinfer.server.context import ServedModel, ServerContext
from jaxinfer.server.lifecycle import running
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.detokenizer import IncrementalDetokenizer
from jaxinfer.weights.open import open_checkpoint


class Reciter:
    """Every request gets the tokens of one text, over and over, one a step."""

    def __init__(self, tokenizer: Any, step_seconds: float):
        self._tokenizer = tokenizer
        self._tokens = tokenizer.encode("The quick brown fox jumps over the lazy dog, says café. ")
        self._step_seconds = step_seconds
        self._requests: dict[str, tuple[RequestState, Completion]] = {}
        self.waiting_for = 0  # requests to gather before the first step
        self.times: list[float] = []

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, **_: Any
    ) -> None:
        completion = CompletionOutput()
        state = RequestState(RequestOutput(request_id, prompt_token_ids, [completion]), params)
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            skip_special_tokens=True,
            stop=(),
            include_stop=False,
            prompt_ids=prompt_token_ids,
            min_tokens=0,
        )
        made = Completion(state, completion, params, detokenizer, frozenset(), params.max_tokens or 100, 0)
        self._requests[request_id] = (state, made)

    def abort_request(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def load(self) -> EngineLoad:
        return EngineLoad(0, len(self._requests), 0.0)

    def step(self) -> list[RequestOutput]:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        self.times.append(time.perf_counter())
        outputs = []
        for request_id, (state, completion) in list(self._requests.items()):
            token = self._tokens[len(completion.output.token_ids) % len(self._tokens)]
            if completion.append(token, None):
                state.output.finished = True
                del self._requests[request_id]
            outputs.append(state.output)
        return outputs


async def main() -> None:
    model, step_seconds = Path(sys.argv[1]), float(sys.argv[2])
    tokenizer = open_checkpoint(model).tokenizer()
    assert tokenizer is not None
    engine = Reciter(tokenizer, step_seconds)
    served = ServedModel(
        name="bench",
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_tokenizer(tokenizer),
        max_model_len=100_000,
        vocab_size=49152,
        defaults={},
    )
    config = ServerConfig(port=0, log_requests=False)
    async with running(ServerContext(served, EngineService(engine), config)) as url:
        print(url.rpartition(":")[2], flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print(json.dumps(engine.times), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
