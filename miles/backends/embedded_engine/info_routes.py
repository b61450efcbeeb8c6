"""Routes that tell about the engine and change nothing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from miles.backends.embedded_engine.errors import Unavailable
from miles.backends.embedded_engine.generate_body import parse_generate_body

if TYPE_CHECKING:
    from miles.backends.embedded_engine.service import EngineService

VERSION = "miles-embedded-engine"
_PROGRESS_POLL_SECS = 0.01


class InfoRoutes:
    """Health and information."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    def add_to(self, app: web.Application) -> None:
        for path, handler in (
            ("/health", self.health),
            ("/ping", self.health),
            ("/health_generate", self.health_generate),
            ("/ready", self.ready),
            ("/model_info", self.model_info),
            ("/get_model_info", self.model_info),
            ("/server_info", self.server_info),
            ("/get_server_info", self.server_info),
            ("/v1/models", self.models),
            ("/v1/loads", self.loads),
        ):
            app.router.add_get(path, handler)

    async def health(self, _: web.Request) -> web.Response:
        """200 once the model is loaded, also while paused; at once."""
        return web.Response(status=200 if self._service.engine.alive else 503)

    async def ready(self, _: web.Request) -> web.Response:
        """200 if a request sent now would be computed now: loaded, and not paused."""
        return web.Response(status=200 if self._service.engine.alive and not self._service.paused else 503)

    async def health_generate(self, _: web.Request) -> web.Response:
        """200 once anything was generated: the token asked for here, or, where it has to wait for its turn, somebody
        else's. 503 after the health timeout, for instance while paused."""
        service = self._service
        if not service.engine.alive:
            return web.Response(status=503)
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        loaded = service.loaded
        parsed = parse_generate_body(body, loaded.limits, None, lambda: 0)
        answer = None
        try:
            answer = service.frontend.submit(service.engine, parsed, None)
            async with asyncio.timeout(service.config.health_timeout):
                await self._generated_anything(asyncio.ensure_future(answer.json()))
        except (TimeoutError, Unavailable):
            return web.Response(status=503)
        finally:
            if answer is not None:
                service.frontend.forget(service.engine, answer)
        return web.Response()

    async def _generated_anything(self, token: asyncio.Future[Any]) -> None:
        try:
            steps = await self._steps()
            while not token.done() and await self._steps() == steps:
                await asyncio.wait({token}, timeout=_PROGRESS_POLL_SECS)
            if token.done():
                token.result()
        finally:
            token.cancel()
            await asyncio.gather(token, return_exceptions=True)

    async def _steps(self) -> int:
        return await self._service.on_engine(lambda scheduler: scheduler.steps)

    async def model_info(self, _: web.Request) -> web.Response:
        loaded = self._service.loaded
        version = await self._service.on_engine(lambda scheduler: scheduler.version)
        return _json(
            {
                "model_path": loaded.model_path,
                "served_model_name": loaded.served_model_name,
                "tokenizer_path": self._service.config.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": version,
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": loaded.info.model_type,
                "architectures": list(loaded.info.architectures),
            }
        )

    async def server_info(self, _: web.Request) -> web.Response:
        """The start-up configuration, and the scheduler's state now."""
        service = self._service
        loaded = service.loaded
        state = await service.on_engine(lambda scheduler: scheduler.info())
        return _json(
            {
                **asdict(service.config),
                "tokenizer_path": service.config.model_path,
                "served_model_name": loaded.served_model_name,
                "context_length": loaded.info.context_length,
                "max_total_num_tokens": loaded.max_total_tokens,
                "vocab_size": loaded.info.vocab_size,
                "tp_size": 1,
                "dp_size": 1,
                "startup_time": service.started,
                "uptime": time.time() - service.started,
                "internal_states": [state],
                "version": VERSION,
                "frontend": "python",
            }
        )

    async def loads(self, _: web.Request) -> web.Response:
        """What the engine computes and what waits, now."""
        state = await self._service.on_engine(lambda scheduler: scheduler.info())
        load = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": state["num_running_reqs"],
            "num_waiting_reqs": state["num_waiting_reqs"],
            "num_used_tokens": state["kv_cache_tokens"],
            "max_total_num_tokens": state["max_total_num_tokens"],
            "max_running_requests": self._service.config.max_running_requests,
        }
        now = datetime.now(UTC).isoformat()
        return _json({"timestamp": now, "version": VERSION, "num_accelerators": 1, "loads": [load]})

    async def models(self, _: web.Request) -> web.Response:
        loaded = self._service.loaded
        model = {
            "id": loaded.served_model_name,
            "object": "model",
            "created": int(self._service.started),
            "owned_by": "miles",
            "root": loaded.model_path,
            "parent": None,
            "max_model_len": loaded.info.context_length,
        }
        return _json({"object": "list", "data": [model]})


def _json(content: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(content), headers={"Content-Type": "application/json"})
