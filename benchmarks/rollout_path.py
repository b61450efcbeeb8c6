"""What one sample costs the rollout process, from the prompt to the rewarded answer, with thousands in flight.

    python benchmarks/rollout_path.py

The whole path of miles (`generate_and_rm_group` on groups of 8: payload, HTTP, parsing, reward) beside the same
requests through bare aiohttp with orjson, and through an httpx pool (`max_connections` = in flight, no timeout), which
only read and parse the answer. A protocol stub in a process of its own answers each request at once, with 1,024 tokens
and their log-probabilities. Each client runs in a process of its own; CPU is that process's, for each answered sample,
once every first request was answered.

"stall" is the longest time for which a task that should run every 5 ms did not, from before the first request on, so
that the ramp is in it: in seconds of CPU of the client, which other processes of a busy machine do not lengthen, and on
the clock. Wanted: httpx at 2,048 in flight takes at least 20 times the CPU of miles; miles at 8,192 at most twice that
of aiohttp; no stall over 250 ms. Takes about a minute; four on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)

from benchmarks import http_client as base  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Loop = Callable[[Callable[[int], None]], Awaitable[None]]  # works for ever and reports answered samples

GROUP_SIZE = 8
TOKENS = 1024
PROMPT_TOKENS = 32
CLIENTS_AT = {256: ("miles", "aiohttp"), 2048: ("miles", "aiohttp", "httpx"), 8192: ("miles", "aiohttp")}
LIMIT_SECS = {256: 20.0, 2048: 30.0, 8192: 75.0}  # for one client; miles and aiohttp need a part of it
HTTPX_LIMIT_SECS = 25.0  # which would take minutes for as many answers
SLACK_SECS = 15.0  # for a client process to start, at most; then it is killed
TICK_SECS = 0.005
WANTED_HTTPX, WANTED_AIOHTTP, WANTED_STALL_SECS = 20.0, 2.0, 0.25


# --- the stub ---


class EngineStub(base.StubServer):
    short = base.response_bytes(TOKENS)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(EngineStub, "127.0.0.1", 0, backlog=8192)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)  # ends with the parent


# --- the clients: so many loops, each for ever ---


@asynccontextmanager
async def miles_loops(port: int, in_flight: int) -> AsyncIterator[list[Loop]]:
    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState, generate_and_rm_group
    from miles.utils import http_utils
    from miles.utils.types import Sample

    args = argparse.Namespace(
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port,
        rollout_num_gpus=1,
        sglang_server_concurrency=in_flight,
        rollout_max_response_len=TOKENS,
        rm_type="deterministic_random",
        sample_max_retries=3,
    )
    http_utils.init_http_client(args)
    state = GenerateState(args)
    state.tokenizer = _Tokenizer()

    async def groups(answered: Callable[[int], None]) -> None:
        while True:
            group = [Sample(group_index=0, index=i, prompt="x" * PROMPT_TOKENS) for i in range(GROUP_SIZE)]
            group = await generate_and_rm_group(state, group, sampling_params=state.sampling_params)
            assert all(s.response_length == TOKENS and s.reward is not None for s in group)
            answered(len(group))

    yield [groups] * max(1, in_flight // GROUP_SIZE)
    await http_utils.close_http_client()


class _Tokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


@asynccontextmanager
async def bare_loops(port: int, in_flight: int, client: str) -> AsyncIterator[list[Loop]]:
    payload = {
        "input_ids": list(b"x" * PROMPT_TOKENS),
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": TOKENS},
        "return_logprob": True,
    }
    open_client = {"httpx": base.httpx_client, "aiohttp": base.aiohttp_client}[client]
    async with open_client(f"http://127.0.0.1:{port}", in_flight) as post:

        async def requests(answered: Callable[[int], None]) -> None:
            while True:
                answer = await post("/generate", payload)
                assert len(answer["output_ids"]) == TOKENS
                answered(1)

        yield [requests] * in_flight


def loops_of(client: str, port: int, in_flight: int) -> Any:
    return miles_loops(port, in_flight) if client == "miles" else bare_loops(port, in_flight, client)


# --- measuring (in the client process) ---


class Stalls:
    """The longest gaps between two turns of a task that sleeps for TICK_SECS, beyond that."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self._at = time.perf_counter(), time.thread_time()

    async def watch(self) -> None:
        self._at = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(TICK_SECS)
            self.look()

    def look(self) -> None:
        """Also for one who ends the process in the middle of a stall."""
        wall, cpu = self._at
        self._at = time.perf_counter(), time.thread_time()
        self.wall = max(self.wall, self._at[0] - wall - TICK_SECS)
        self.cpu = max(self.cpu, self._at[1] - cpu)


class Window:
    """CPU for each answered sample, once as many were answered as are in flight: over twice as many more.

    What has not come so far when the time is over: the ramp included; and where nothing was answered at all, a lower
    bound, as if everything in flight were answered at that moment.
    """

    def __init__(self, in_flight: int, stalls: Stalls) -> None:
        self._in_flight = in_flight
        self._stalls = stalls
        self._count = 0
        self._began = (0, time.perf_counter(), time.process_time())
        self._warm = False

    def answered(self, samples: int) -> None:
        self._count += samples
        if not self._warm and self._count >= self._in_flight:
            self._warm = True
            self._began = (self._count, time.perf_counter(), time.process_time())
        elif self._count >= 3 * self._in_flight:
            self.end()

    def end(self, *_: object) -> None:
        """Print the measurement as JSON and end the process at once: cancelling thousands of tasks is not measured."""
        self._stalls.look()
        count, wall, cpu = self._began
        samples = self._count - count
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        base.finish(
            {
                "samples_per_sec": samples / wall,
                "cpu_ms": 1000 * cpu / (samples or self._in_flight),
                "warm": self._warm,
                "stall_cpu": self._stalls.cpu,
                "stall_wall": self._stalls.wall,
            }
        )


async def measure(client: str, port: int, in_flight: int, limit_secs: float) -> None:
    """The time limit is a signal: a client that needs minutes for a round of its loop would not look at a clock."""
    stalls = Stalls()
    async with loops_of(client, port, in_flight) as loops:
        watch = asyncio.create_task(stalls.watch())
        await asyncio.sleep(4 * TICK_SECS)
        window = Window(in_flight, stalls)
        signal.signal(signal.SIGALRM, window.end)
        signal.setitimer(signal.ITIMER_REAL, limit_secs)
        await asyncio.gather(watch, *(loop(window.answered) for loop in loops))
    raise AssertionError("the window ends the process")


# --- the run ---


def child(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}, **options
    )


def measurement(client: str, in_flight: int, limit_secs: float) -> dict[str, float] | None:
    """One client's numbers against a stub of its own; None where it did not start."""
    server = child("--serve", stdin=subprocess.PIPE)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        numbers = ("--port", port, "--in-flight", str(in_flight), "--limit-secs", str(limit_secs))
        process = child("--measure", client, *numbers)
        try:
            output, _ = process.communicate(timeout=SLACK_SECS + limit_secs)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return None
        return json.loads(output) if output else None
    finally:
        server.kill()
        server.communicate()


def run() -> bool:
    started = time.monotonic()
    ok = True
    for in_flight, clients in CLIENTS_AT.items():
        limits = {client: HTTPX_LIMIT_SECS if client == "httpx" else LIMIT_SECS[in_flight] for client in clients}
        results = {client: measurement(client, in_flight, limit) for client, limit in limits.items()}
        _say(f"{in_flight} samples in flight, {TOKENS} tokens each")
        for client, numbers in results.items():
            _say(f"  {client:8} " + ("no result: too slow to start" if numbers is None else _line(numbers)))
        ok &= _judge(in_flight, results)
    _say(f"{time.monotonic() - started:.0f} s")
    return ok


def _line(numbers: dict[str, float]) -> str:
    bound = "" if numbers["samples_per_sec"] else ", a lower bound"
    note = "" if numbers["warm"] else f" (time over, ramp included{bound})"
    return (
        f"{numbers['samples_per_sec']:7.0f} samples/s {numbers['cpu_ms']:9.3f} ms CPU each{note}   longest stall"
        f" {1000 * numbers['stall_cpu']:6.0f} ms of CPU, {1000 * numbers['stall_wall']:6.0f} on the clock"
    )


def _judge(in_flight: int, results: dict[str, dict[str, float] | None]) -> bool:
    ours = results["miles"]
    if ours is None or not ours["warm"]:
        _say("  miles has not answered every sample once: FAILED")
        return False
    ok = True
    for client in ("aiohttp", "httpx"):
        numbers = results.get(client)
        if numbers is None:
            continue
        if client == "aiohttp":
            ratio = ours["cpu_ms"] / numbers["cpu_ms"]
            line, good = f"miles / aiohttp {ratio:6.2f}", ratio <= WANTED_AIOHTTP
            wanted = f"at most {WANTED_AIOHTTP}" if in_flight == max(CLIENTS_AT) else ""
        else:
            ratio = numbers["cpu_ms"] / ours["cpu_ms"]
            line, good = f"httpx / miles   {ratio:6.1f}", ratio >= WANTED_HTTPX
            wanted = f"at least {WANTED_HTTPX}"
        _say(f"  {line}" + (f"  (wanted: {wanted}) {'ok' if good else 'MISSED'}" if wanted else ""))
        ok &= good or not wanted
    good = ours["stall_cpu"] <= WANTED_STALL_SECS
    _say(f"  stall of miles {1000 * ours['stall_cpu']:7.0f} ms  (wanted: at most 250) {'ok' if good else 'MISSED'}")
    return ok and good


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def raise_file_limit() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(CLIENTS_AT) + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=("miles", "aiohttp", "httpx"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--in-flight", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--limit-secs", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    raise_file_limit()
    if args.serve:
        asyncio.run(serve())
    elif args.measure:
        asyncio.run(measure(args.measure, args.port, args.in_flight, args.limit_secs))
    else:
        return 0 if run() else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
