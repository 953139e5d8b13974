from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import openai
import pytest
from scripted import ScriptedEngine, Server, serving


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """serve(engine, **settings of ServerConfig): a running server, ended after the test."""
    with contextlib.ExitStack() as stack:

        def start(engine: ScriptedEngine | None = None, **settings) -> Server:
            return stack.enter_context(serving(engine or ScriptedEngine(), **settings))

        yield start


@pytest.fixture
def client_of() -> Iterator[Callable[..., openai.OpenAI]]:
    """The real client, for a server."""
    with contextlib.ExitStack() as stack:

        def make(server: Server, key: str = "none") -> openai.OpenAI:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)
            return stack.enter_context(client)

        yield make
