"""Everything behind the HTTP routes, put together: engine thread, front end, weight thread, and what is loaded."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from miles.backends.embedded_engine.engine_thread import EngineThread
from miles.backends.embedded_engine.errors import Unavailable
from miles.backends.embedded_engine.frontend import Frontend

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles.backends.embedded_engine.config import EngineConfig
    from miles.backends.embedded_engine.generate_body import ModelLimits
    from miles.backends.embedded_engine.model import ModelInfo
    from miles.backends.embedded_engine.scheduler import Scheduler
    from miles.backends.embedded_engine.tokenizer import Tokenizer
    from miles.backends.embedded_engine.weights import StagedWeights, WeightReceiver

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """What exists once the model is there. `model_path` follows update_weights_from_disk."""

    info: ModelInfo
    limits: ModelLimits
    tokenizer: Tokenizer | None
    receiver: WeightReceiver
    model_path: str
    served_model_name: str
    max_total_tokens: int


class EngineService:
    """Create and `start` it on the event loop; `close` it there, once or more."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.started = time.time()
        self.frontend = Frontend(
            max_requests=config.max_queued_requests,
            random_seed=config.random_seed,
            engine_url=f"http://{config.host}:{config.port}",
        )
        self._loop = asyncio.get_running_loop()
        self._loaded: Loaded | None = None
        self.ended = asyncio.Event()
        """Set when the engine thread has ended, for whatever reason."""
        self.ready = asyncio.Event()
        self.engine = EngineThread(
            self._load,
            self.frontend.deliver_from_thread,
            on_ready=partial(self._on_loop, self.ready.set),
            on_exit=partial(self._on_loop, self._engine_ended),
        )
        self._weight_thread = ThreadPoolExecutor(1, thread_name_prefix="miles-weights")
        self._weight_lock = asyncio.Lock()
        self.paused = False
        """Whether the last pause or continue was a pause."""

    @property
    def loaded(self) -> Loaded:
        """Raises Unavailable while the model is loading, and after the engine has ended."""
        if self._loaded is None or not self.engine.alive:
            raise Unavailable("The engine is not ready.")
        return self._loaded

    def start(self) -> None:
        self.engine.start()

    async def close(self) -> None:
        """End the engine thread (bounded); calls in flight fail with 503. A weight call that hangs is left behind."""
        self.frontend.fail_all(Unavailable("The engine is shutting down."))
        await asyncio.to_thread(self.engine.close, 1.0)
        self._weight_thread.shutdown(wait=False, cancel_futures=True)

    async def on_engine(self, command: Callable[[Scheduler], T]) -> T:
        """Run `command` on the engine thread, between two steps."""
        _ = self.loaded
        return await asyncio.wrap_future(self.engine.call(command))

    async def on_weight_thread(self, command: Callable[[], T]) -> T:
        """Run `command` after the weight calls before it; the event loop and the engine go on meanwhile."""
        _ = self.loaded
        async with self._weight_lock:
            return await self._loop.run_in_executor(self._weight_thread, command)

    async def publish(self, staged: StagedWeights) -> None:
        await self.on_engine(lambda scheduler: scheduler.publish(staged.tensors, staged.version))

    def set_model_path(self, path: str) -> None:
        self._loaded = replace(self.loaded, model_path=path, served_model_name=path)

    def _load(self) -> Scheduler:
        """On the engine thread: the imports take seconds, and /health answers meanwhile."""
        from miles.backends.embedded_engine.loading import load

        self._loaded, scheduler = load(self.config)
        logger.info(
            "Serving %s on http://%s:%d (%s, %s, %d tokens of KV cache), %.1f s after the start",
            self.config.model_path,
            self.config.host,
            self.config.port,
            scheduler.model.info.kv_shape.device,
            self.config.dtype,
            scheduler.cache.max_total_tokens,
            time.time() - self.started,
        )
        return scheduler

    def _on_loop(self, callback: Callable[[], Any]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _engine_ended(self) -> None:
        self.frontend.fail_all(Unavailable("The engine has ended."))
        self.ended.set()
