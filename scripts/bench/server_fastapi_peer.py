"""Benchmark server: FastAPI on uvicorn, streaming as most servers do: a queue a request, a dict and json.dumps an event.

Arguments and output as server_ours.py. It detokenises nothing: the pieces of text are ready. Runs in .venv-peers.
"""

import asyncio
import json
import sys
import threading
import time

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

PIECES = [
    "The",
    " quick",
    " brown",
    " fox",
    " jumps",
    " over",
    " the",
    " lazy",
    " dog",
    ",",
    " says",
    " café",
    ".",
]
app = FastAPI()
queues = {}
times = []


async def tick(seconds):
    """One token for every stream, then the next, as an engine's steps come."""
    while True:
        await asyncio.sleep(seconds)
        if queues:
            times.append(time.perf_counter())
            for queue, sent in list(queues.values()):
                queue.put_nowait(PIECES[sent[0] % len(PIECES)])
                sent[0] += 1


@app.post("/v1/chat/completions")
async def chat(request: Request):
    body = await request.json()
    count = body["max_tokens"]

    async def events():
        queue, key = asyncio.Queue(), object()
        frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        yield f"data: {json.dumps({**frame, 'choices': [choice]})}\n\n"
        queues[key] = (queue, [0])
        try:
            for i in range(count):
                text = await queue.get()
                end = "length" if i == count - 1 else None
                choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": end}
                yield f"data: {json.dumps({**frame, 'choices': [choice]})}\n\n"
        finally:
            del queues[key]
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def main():
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", access_log=False)
    )
    ticker = asyncio.create_task(tick(float(sys.argv[2])))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    threading.Thread(
        target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(ended.set)), daemon=True
    ).start()
    await ended.wait()
    print(json.dumps(times), flush=True)
    ticker.cancel()
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
