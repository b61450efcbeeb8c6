"""How much an HTTP client costs a rollout process: miles' client beside bare aiohttp + orjson and an httpx pool.

    python benchmarks/http_client.py

One run, three processes: this one, a stub server that answers every POST at once, and, one after the other, a client
that keeps 256 or 2,048 requests in flight. CPU is that of the client process alone. The second table is one response of
8,192 tokens with their log-probabilities, received and parsed. Absolute numbers are the machine's; the ratios are the
result. Takes at most 90 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Post = Callable[[str, Any], Awaitable[Any]]  # (path, payload) -> the parsed response

CLIENTS = ("httpx", "aiohttp", "miles")
WARM_UP_AND_WINDOW_SECS = {256: (1.5, 3.0), 2048: (3.0, 7.0)}  # by requests in flight
LONG_TOKENS = 8192
LONG_SECS = 2.0
SLACK_SECS = 5.0  # for a client process to start, at most; then it is killed


# --- the stub server ---


def response_bytes(tokens: int) -> bytes:
    """A /generate response of so many tokens, in SGLang's form, with headers."""
    rng = random.Random(0)
    ids = [rng.randrange(150_000) for _ in range(tokens)]
    body = orjson.dumps(
        {
            "text": "x" * tokens,
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "length", "length": tokens},
                "weight_version": "1",
                "output_token_logprobs": [[-rng.expovariate(1.0), token, None] for token in ids],
            },
        }
    )
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class StubServer(asyncio.Protocol):
    """Answers every request at once with a canned response: a long one under /long."""

    short, long = response_bytes(16), response_bytes(LONG_TOKENS)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            length_at = head.find(b"content-length:")
            length = int(head[length_at + 15 :].split(b"\r\n", 1)[0]) if length_at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            self.buffer = self.buffer[end + 4 + length :]
            answer = self.long if head.startswith(b"post /long") else self.short
            self.transport.write(answer)  # type: ignore[attr-defined]


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(StubServer, "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)  # ends with the parent


# --- the three clients ---


@asynccontextmanager
async def httpx_client(url: str, in_flight: int) -> AsyncIterator[Post]:
    import httpx

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=in_flight), timeout=None) as client:

        async def post(path: str, payload: Any) -> Any:
            response = await client.post(url + path, json=payload)
            response.raise_for_status()
            return response.json()

        yield post


@asynccontextmanager
async def aiohttp_client(url: str, in_flight: int) -> AsyncIterator[Post]:
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:
        headers = {"Content-Type": "application/json"}

        async def post(path: str, payload: Any) -> Any:
            async with session.post(url + path, data=orjson.dumps(payload), headers=headers) as response:
                response.raise_for_status()
                return orjson.loads(await response.read())

        yield post


@asynccontextmanager
async def miles_client(url: str, in_flight: int) -> AsyncIterator[Post]:
    from miles.utils import http_utils

    http_utils.init_http_client(argparse.Namespace(rollout_num_gpus=1, sglang_server_concurrency=in_flight))

    async def post(path: str, payload: Any) -> Any:
        return await http_utils.post(url + path, payload)

    yield post
    await http_utils.close_http_client()


# --- measuring (in the client process) ---


async def measure_throughput(post: Post, in_flight: int) -> dict[str, float]:
    """Requests per second and CPU seconds per request with `in_flight` loops that each send one after another.

    The clock is a signal: a client that needs a minute for one round of its event loop would never look at another.
    """
    payload = {"input_ids": list(range(32)), "sampling_params": {"max_new_tokens": 16}, "return_logprob": True}
    warm_up_secs, window_secs = WARM_UP_AND_WINDOW_SECS[in_flight]
    done, wall, cpu = 0, 0.0, 0.0

    def on_alarm(*_: object) -> None:
        nonlocal done, wall, cpu
        if not wall:  # the warm-up is over
            done, wall, cpu = 0, time.perf_counter(), time.process_time()
            return
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        finish({"requests_per_sec": done / wall, "cpu_ms": 1000 * cpu / max(1, done)})

    async def send_for_ever() -> None:
        nonlocal done
        while True:
            await post("/generate", payload)
            done += 1

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, warm_up_secs, window_secs)
    await asyncio.gather(*(send_for_ever() for _ in range(in_flight)))
    raise AssertionError("the alarm ends the process")


async def measure_long_response(post: Post) -> dict[str, float]:
    """CPU seconds to receive and parse one long response."""
    for _ in range(3):
        await post("/long", {})
    count, cpu, until = 0, time.process_time(), time.perf_counter() + LONG_SECS
    while time.perf_counter() < until:
        answer = await post("/long", {})
        assert len(answer["output_ids"]) == LONG_TOKENS
        count += 1
    return {"cpu_ms": 1000 * (time.process_time() - cpu) / count}


async def measure(client: str, url: str, in_flight: int) -> None:
    """Print the measurement as JSON and end the process at once: cancelling thousands of requests is not measured."""
    open_client = {"httpx": httpx_client, "aiohttp": aiohttp_client, "miles": miles_client}[client]
    async with open_client(url, max(1, in_flight)) as post:
        finish(await (measure_throughput(post, in_flight) if in_flight else measure_long_response(post)))


def finish(result: dict[str, float]) -> None:
    sys.stdout.write(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


# --- the run ---


def child(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}, **options
    )


def measurement(client: str, url: str, in_flight: int) -> dict[str, float] | None:
    """One client's numbers; None where it is not installed or did not finish."""
    if client != "miles" and find_spec(client) is None:
        return None
    process = child("--measure", client, "--url", url, "--in-flight", str(in_flight))
    try:
        output, _ = process.communicate(timeout=SLACK_SECS + sum(WARM_UP_AND_WINDOW_SECS.get(in_flight, (LONG_SECS,))))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    return json.loads(output) if output else None


def report(title: str, results: dict[str, dict[str, float] | None]) -> None:
    sys.stdout.write(f"\n{title}\n")
    ours = results["miles"]
    for client, numbers in results.items():
        if numbers is None:
            sys.stdout.write(f"  {client:8} no result: not installed, or too slow to start\n")
            continue
        line = f"  {client:8}"
        if "requests_per_sec" in numbers:
            line += f" {numbers['requests_per_sec']:8.0f} requests/s"
        unanswered = numbers.get("requests_per_sec") == 0  # then the CPU spent on none is a lower bound
        line += f" {'>' if unanswered else ' '}{numbers['cpu_ms']:8.2f} ms CPU each"
        if ours is not None and client != "miles":
            line += f"   = {numbers['cpu_ms'] / ours['cpu_ms']:6.2f} x the CPU of miles"
            if "requests_per_sec" in numbers:
                line += f", {numbers['requests_per_sec'] / ours['requests_per_sec']:.3f} x its requests/s"
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--in-flight", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    raise_file_limit()
    if args.serve:
        asyncio.run(serve())
    elif args.measure:
        asyncio.run(measure(args.measure, args.url, args.in_flight))
    else:
        run()


def run() -> None:
    started = time.monotonic()
    server = child("--serve", stdin=subprocess.PIPE)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        for in_flight in WARM_UP_AND_WINDOW_SECS:
            report(f"{in_flight} requests in flight", {name: measurement(name, url, in_flight) for name in CLIENTS})
        report(
            f"one response of {LONG_TOKENS} tokens, received and parsed (httpx with the standard library's json)",
            {name: measurement(name, url, 0) for name in CLIENTS},
        )
    finally:
        server.kill()
        server.communicate()
    sys.stdout.write(f"\n{time.monotonic() - started:.0f} s\n")


def raise_file_limit() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(WARM_UP_AND_WINDOW_SECS) + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


if __name__ == "__main__":
    main()
