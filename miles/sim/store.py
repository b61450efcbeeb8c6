"""Stores of finished groups as a user might write them (`--custom-async-data-buffer-path`).

newest_first    the newest group first; `put` waits while it is full
refusing        the oldest first; never waits: where it is full, its oldest group is generated anew; drops some

In quiet times both are ordinary queues, so that every group gets its turn.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from miles.sim.noise import noise
from miles.sim.observer import index_of

if TYPE_CHECKING:
    from miles.rollout._fully_async_buffer import DataBufferConstructorInput, DataBufferInput
    from miles.sim.faults import FaultBook
    from miles.sim.observer import Observer
    from miles.sim.schedule import Schedule
    from miles.sim.trace import Trace

_DROPPED_SHARE = 0.05


class SimulatedStore:
    def __init__(
        self,
        input: DataBufferConstructorInput,
        schedule: Schedule,
        faults: FaultBook,
        observer: Observer,
        trace: Trace,
    ) -> None:
        self._input = input
        self._schedule = schedule
        self._faults = faults
        self._observer = observer
        self._trace = trace
        self._changed = asyncio.Event()
        self.items: list[DataBufferInput] = []

    @property
    def capacity(self) -> int:
        return self._input.capacity_groups

    async def put(self, item: DataBufferInput) -> None:
        if self._schedule.store == "refusing" and not self._faults.quiet:
            if self._drops(item):
                return
            if len(self.items) >= self.capacity:
                self._refuse(self.items.pop(0))
        while len(self.items) >= self.capacity:
            await self._change()
        self.items.append(item)
        self._changed.set()

    async def get(self, **context: Any) -> DataBufferInput:
        while not self.items:
            await self._change()
        newest = self._schedule.store == "newest_first" and not self._faults.quiet
        item = self.items.pop(-1 if newest else 0)
        self._changed.set()
        return item

    def get_metrics(self) -> dict[str, Any]:
        return {"rollout/simulated_store/groups": len(self.items)}

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _drops(self, item: DataBufferInput) -> bool:
        index = index_of(item.prompt_group)
        if noise(self._schedule.seed, index, 21) >= _DROPPED_SHARE:
            return False
        self._trace.add("store drops", index)
        self._observer.dropped(index, "store")
        self._input.drop_fn(item.prompt_group)
        return True

    def _refuse(self, item: DataBufferInput) -> None:
        self._trace.add("store refuses", index_of(item.prompt_group))
        self._input.unused_handler_fn(item.prompt_group)
