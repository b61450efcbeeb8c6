"""Brings engines to the trainer's weights: after training steps, and in between where an engine has come back.

publish()      begin_update --> connect where the engines are others than before --> update --> finish_update
                    ^                        |                                          |
                    +--- fail_update --------+------------------------------------------+
               An engine that fails is taken out, and the others get the same version again.

wait(batch)    the trainer is idle. An engine that has come back gets
               - the published weights again, under the same version and without disturbing the others, where no
                 training step has been made since;
               - else nothing until the next `publish`, unless no engine serves: then there would be no batch. The
                 rollout hears of the new version before the engines get it, and refuses where it has handed the batch
                 over already: that batch was measured against the version before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from miles.backends.megatron_utils.engine_client import WeightUpdateError
from miles.ray.supervisor import original_error
from miles.ray.waits import result_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miles.ray.rollout.engine_states import EngineRef, FleetView
    from miles.ray.train_group import TrainGroup

logger = logging.getLogger(__name__)

POLL_SECS = 1.0


class WeightPublisher:
    """See the module docstring. `manager` is the RolloutManager's actor handle.

    `on_published(version)` is called when the engines have a new version, `on_view(view)` whenever the driver has
    learned how the engines are, `on_paused(start, end)` after an update with the time, in seconds since the epoch,
    during which no engine generated.
    """

    def __init__(
        self,
        manager: Any,
        trainers: TrainGroup,
        *,
        tolerates_faults: bool,
        on_published: Callable[[int], None],
        on_view: Callable[[FleetView], None],
        on_paused: Callable[[float, float], None] = lambda start, end: None,
    ) -> None:
        self._manager = manager
        self._trainers = trainers
        self._tolerates_faults = tolerates_faults
        self._on_published = on_published
        self._on_view = on_view
        self._on_paused = on_paused
        self._connected: tuple[EngineRef, ...] = ()
        self._has_trained = True
        self._version = 0

    def on_trained(self) -> None:
        """The trainer's weights are others than the published ones now."""
        self._has_trained = True

    async def publish(self) -> dict[str, float]:
        """Send the trainer's weights to every engine as a new version; returns metrics."""
        version, metrics = await self._send()
        self._has_trained, self._version = False, version
        self._on_published(version)
        return metrics

    async def engine_waits(self) -> bool:
        """Whether an engine has come back and waits for weights."""
        return self._tolerates_faults and bool((await self._look()).waiting)

    async def wait(self, batch: Awaitable[Any]) -> Any:
        """The batch; engines that come back meanwhile are brought to current weights where that is possible."""
        if not self._tolerates_faults:
            return await batch
        waiting = asyncio.ensure_future(result_of(batch))
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=POLL_SECS)
                if not waiting.done():
                    await self._heal()
            return waiting.result()
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _heal(self) -> None:
        view = await self._look()
        if not view.waiting:
            return
        if not self._has_trained:
            await self._send(only_waiting=True)
        elif not view.serving and await self._manager.announce_weight_version.remote(self._version + 1):
            await self.publish()

    async def _look(self) -> FleetView:
        return self._take_in(await self._manager.engines.remote())

    async def _send(self, *, only_waiting: bool = False) -> tuple[int, dict[str, float]]:
        """Send weights until no engine fails; returns version and metrics.

        `only_waiting`: the published version again, to the engines that lack it; where there is none any more nothing
        is sent.
        """
        while True:
            engines: tuple[EngineRef, ...] = await self._manager.begin_update.remote(only_waiting)
            if not engines:
                return 0, {}
            try:
                if engines != self._connected:
                    self._connected = ()
                    await self._trainers.connect_engines([engine.url for engine in engines])
                    self._connected = engines
                version, metrics = await self._trainers.update_weights(again=only_waiting)
                if not only_waiting:  # else the other engines went on
                    end = time.time()  # continuing the engines is the last thing that an update does
                    self._on_paused(end - metrics.get("perf/weight_update_pause_seconds", 0.0), end)
            except Exception as error:  # the one place where a failed update becomes a lost engine
                failure = original_error(error)
                self._connected = ()
                if not (self._tolerates_faults and isinstance(failure, WeightUpdateError)):
                    raise
                logger.warning("the update is repeated without the engine that failed: %s", failure)
                await self._manager.fail_update.remote(
                    engines, failure.engine_urls, str(failure), failure.status is not None
                )
                continue
            self._take_in(await self._manager.finish_update.remote(engines, version))
            return version, metrics

    def _take_in(self, view: FleetView) -> FleetView:
        self._on_view(view)
        return view
