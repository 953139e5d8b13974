#!/usr/bin/env python
"""What the server costs beside the model: streamed chats over loopback, ours and a FastAPI/uvicorn handler, in turns. Prints JSON.

An engine that recites stands in for the model. `events_per_cpu_s` is streamed events over the server process's CPU seconds, all of
it: detokenising, JSON, events, sockets. `added_ms` is from the step that made a token to its arrival at the client, with a step every 20 ms. Peers
need `scripts/bench_peers`.

    python scripts/bench_server.py [--streams 64] [--tokens 200] [--rounds 3] [--no-peers]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jaxinfer.weights import presets

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """A server process."""

    def __init__(self, kind: str, step_seconds: float):
        python = sys.executable if kind == "ours" else os.environ.get("PEERS", str(PEERS))
        name = "server_ours.py" if kind == "ours" else "server_fastapi_peer.py"
        script = ROOT / "scripts" / "bench" / name
        model = presets.resolve("smollm2-135m")
        self.process = subprocess.Popen(
            [python, str(script), str(model), str(step_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def close(self) -> list[float]:
        """Times of its steps."""
        answer, _ = self.process.communicate("")
        return json.loads(answer)


async def read_stream(port: int, tokens: int, text: str = "go") -> list[float]:
    """Arrival time of every event with text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": text}],
            **{"stream": True, "max_tokens": tokens, "ignore_eos": True, "temperature": 0},
        }
    ).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    arrivals: list[float] = []
    buffer = b""
    while b"data: [DONE]" not in buffer:
        data = await reader.read(2**18)
        if not data:
            raise SystemExit(f"error: a stream ended early: {buffer[-300:]!r}")
        count = data.count(b'"content":')
        arrivals += [time.perf_counter()] * count
        buffer = buffer[-100:] + data
    writer.close()
    return arrivals[1:]  # the first is the role's


def measure(kind: str, streams: int, tokens: int, step_seconds: float) -> dict[str, float]:
    server = Server(kind, step_seconds)

    async def all_streams() -> list[list[float]]:
        return await asyncio.gather(*(read_stream(server.port, tokens) for _ in range(streams)))

    asyncio.run(all_streams_of(server, 2, 20))  # warm
    cpu, wall = server.cpu_seconds(), time.perf_counter()
    arrivals = asyncio.run(all_streams())
    cpu, wall = server.cpu_seconds() - cpu, time.perf_counter() - wall
    steps = server.close()
    events = sum(map(len, arrivals))
    figures = {
        "events_per_cpu_s": events / cpu,
        "cpu_us_per_token": cpu / (streams * tokens) * 1e6,
        "events_per_s": events / wall,
    }
    if step_seconds:
        added = []
        for stream in arrivals:
            place = 0
            for when in stream:
                while place + 1 < len(steps) and steps[place + 1] <= when:
                    place += 1
                added.append((when - steps[place]) * 1e3)
        added.sort()
        figures |= {"added_ms_p50": added[len(added) // 2], "added_ms_p99": added[int(len(added) * 0.99)]}
    return figures


async def all_streams_of(server: Server, streams: int, tokens: int) -> None:
    await asyncio.gather(*(read_stream(server.port, tokens) for _ in range(streams)))


def throughput_with_a_model(requests: int, tokens: int, rounds: int) -> dict[str, float]:
    """Tokens a second of a real model behind the server and without it, in turns."""
    settings = [str(presets.resolve("smollm2-135m")), str(requests), str(tokens)]
    alone = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/bench/in_process.py"), *settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert alone.stdin is not None
    assert alone.stdout is not None
    alone.stdout.readline()
    serve = [
        sys.executable,
        "-m",
        "jaxinfer.serve",
        "--model",
        "smollm2-135m",
        "--port",
        "0",
        "--no-log-requests",
    ]
    server = subprocess.Popen(
        [*serve, "--max-num-seqs", str(requests), "--max-model-len", "2048"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    port = next(int(line.rpartition(":")[2]) for line in server.stderr if line.startswith("serving"))

    async def all_requests() -> None:
        texts = [f"Tell me about the number {i}." for i in range(requests)]
        await asyncio.gather(*(read_stream(port, tokens, text) for text in texts))

    def behind() -> float:
        start = time.perf_counter()
        asyncio.run(all_requests())
        return requests * tokens / (time.perf_counter() - start)

    def without() -> float:
        assert alone.stdin is not None
        assert alone.stdout is not None
        alone.stdin.write("\n")
        alone.stdin.flush()
        return float(alone.stdout.readline())

    behind()  # warm
    without()
    pairs = [(behind(), without()) for _ in range(rounds)]
    alone.communicate("")
    server.terminate()
    server.communicate()
    return {
        "server_tokens_per_s": round(statistics.median(a for a, _ in pairs), 1),
        "engine_tokens_per_s": round(statistics.median(b for _, b in pairs), 1),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
    }


def medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the server costs beside the model.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()
    kinds = ["ours"] if args.no_peers else ["ours", "fastapi"]
    settings = {
        "as fast as it can": (args.streams, 0.0),
        "a step every 20 ms": (args.streams, 0.02),
        "200 streams, a step every 50 ms": (200, 0.05),
    }
    report: dict[str, Any] = {}
    for name, (streams, step) in settings.items():
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for _ in range(args.rounds):
            for kind in kinds:
                runs[kind].append(measure(kind, streams, args.tokens, step))
        report[name] = {kind: medians(found) for kind, found in runs.items()}
        if len(kinds) > 1:
            ratios = [
                a["events_per_cpu_s"] / b["events_per_cpu_s"]
                for a, b in zip(runs["ours"], runs["fastapi"], strict=True)
            ]
            report[name]["ratio of events_per_cpu_s"] = round(statistics.median(ratios), 2)
    report["smollm2-135m, 32 requests"] = throughput_with_a_model(32, 64, args.rounds)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
