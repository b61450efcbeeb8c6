"""A protocol stub at the HTTP boundary: router and engine in one in-process server, and the smallest tokenizer."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER = "ok"


class CharTokenizer:
    """One token per character; its id is the code point."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        assert not tokenize
        head = f"[{len(tools)} tools]" if tools else ""
        body = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return head + body + ("<assistant>" if add_generation_prompt else "") + kwargs.get("suffix", "")


def response(text: str = ANSWER, *, reason: str = "stop", **meta: Any) -> dict[str, Any]:
    """An engine's answer of one token per character."""
    return {
        "text": text,
        "output_ids": [ord(c) for c in text],
        "meta_info": {
            "finish_reason": {"type": reason},
            "weight_version": "0",
            "prompt_tokens": 3,
            "cached_tokens": 1,
            "completion_tokens": len(text),
            "output_token_logprobs": [[-0.5, ord(c), None] for c in text],
            **meta,
        },
    }


class EngineStub:
    """Serves /generate, /workers and /abort_request and records what it is asked.

    `respond(payload)` makes the answers. A request for which `holds(payload)` is true waits until it is aborted (it
    then returns `partial` with the finish reason abort) or `release` is set. Other requests are answered once
    `expected_held` requests are held. The first `unlisted` requests for /workers fail.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts: list[dict[str, Any]] = []
        self.respond: Callable[[dict[str, Any]], dict[str, Any]] = lambda payload: response()
        self.holds: Callable[[dict[str, Any]], bool] = lambda payload: False
        self.partial = "pa"
        self.release = asyncio.Event()
        self.expected_held = 0
        self.held = 0
        self.all_held = asyncio.Event()
        self.unlisted = 0
        self.in_flight = 0
        self.peak = 0
        self._abort = asyncio.Event()
        self._abort_arrived = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def __aenter__(self) -> EngineStub:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/workers", self._workers)
        app.router.add_post("/abort_request", self._abort_request)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._runner is not None
        self.release.set()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def args(self, **overrides: Any) -> Namespace:
        """Flags of a run against this server."""
        return make_args(sglang_router_ip="127.0.0.1", sglang_router_port=self.port, **overrides)

    async def wait_for_aborts(self, count: int) -> None:
        """Wait until `count` abort requests have arrived in all."""
        async with self._abort_arrived:
            await self._abort_arrived.wait_for(lambda: len(self.aborts) >= count)

    async def _generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        self.requests.append(payload)
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            if self.holds(payload) and await self._aborted_before_release():
                return web.json_response(response(self.partial, reason="abort"))
            if self.expected_held:
                await self.all_held.wait()
            return web.json_response(self.respond(payload))
        finally:
            self.in_flight -= 1

    async def _aborted_before_release(self) -> bool:
        abort = self._abort
        self.held += 1
        if self.held >= self.expected_held:
            self.all_held.set()
        waits = [asyncio.ensure_future(event.wait()) for event in (abort, self.release)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return abort.is_set()

    async def _workers(self, request: web.Request) -> web.Response:
        if self.unlisted > 0:
            self.unlisted -= 1
            raise web.HTTPServiceUnavailable
        return web.json_response({"workers": [{"url": f"{self.url}@0"}, {"url": f"{self.url}@1"}]})

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        async with self._abort_arrived:
            self.aborts.append(body)
            self._abort_arrived.notify_all()
        self._abort.set()
        self._abort = asyncio.Event()
        return web.Response()


def make_args(**overrides: Any) -> Namespace:
    """The flags that the rollout library reads, at values for tests."""
    values: dict[str, Any] = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 16,
        "rollout_max_context_len": None,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_seed": 42,
        "rollout_global_dataset": False,
        "sglang_server_concurrency": 64,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "custom_generate_function_path": None,
        "custom_rm_path": None,
        "rm_type": "random",
        "group_rm": False,
        "partial_rollout": False,
        "hf_checkpoint": "no-checkpoint",
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 1,
        "save": None,
        "load": None,
    }
    return Namespace(**{**values, **overrides})
