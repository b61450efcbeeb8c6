"""Finished groups between generation and the drain: the store, and in front of it what was taken and given back.

put ---> store (first in, first out, or a custom one) ---> take
             put_back, restore ---> returned (first) -------^
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from miles.rollout._fully_async_buffer import DataBuffer, DataBufferInput, DefaultDataBuffer
from miles.rollout._fully_async_groups import take_stock
from miles.rollout._fully_async_ledger import Owner

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from miles.rollout._fully_async_ledger import GroupKey, GroupLedger
    from miles.rollout._fully_async_versions import VersionLabel
    from miles.rollout._fully_async_window import ActiveTime


class FinishedGroups:
    """`blocked` learns when a group waits for room."""

    def __init__(self, store: DataBuffer, ledger: GroupLedger, blocked: ActiveTime) -> None:
        self.store = store
        self.returned: deque[DataBufferInput] = deque()
        self.waiting_puts = 0
        """Finished groups that wait for room."""

        self._builtin = store if isinstance(store, DefaultDataBuffer) else None
        self._ledger = ledger
        self._entrance = asyncio.Lock()
        self._one_taken = asyncio.Event()  # of the returned ones
        self._blocked = blocked

    @property
    def size(self) -> int:
        """Groups that wait for the trainer."""
        return self._ledger.queued if self._builtin is None else len(self.returned) + self._builtin.qsize()

    @property
    def size_bytes(self) -> int:
        """Estimated bytes of the groups that wait for the trainer."""
        if self._builtin is None:
            return sum(key.size_bytes for key in self._ledger.held_by(Owner.QUEUED))
        return self._builtin.size_bytes + sum(item.entry.size_bytes for item in self.returned)

    @property
    def queue(self) -> asyncio.Queue[Any] | None:
        """The built-in store's; None before `open`."""
        return None if self._builtin is None else self._builtin.queue

    @queue.setter
    def queue(self, queue: asyncio.Queue[Any]) -> None:
        if self._builtin is not None:
            self._builtin.queue = queue

    def open(self) -> None:
        if self._builtin is not None:
            self._builtin.open()

    def put_at_once(self, item: DataBufferInput) -> bool:
        """`put` where that need not wait; else nothing happens."""
        if self.waiting_puts or self._builtin is None or self._is_full_of_returned:
            return False
        if not self._builtin.put_at_once(item):
            return False
        self._ledger.queue(item.entry)
        return True

    async def put(self, item: DataBufferInput) -> None:
        """IN_FLIGHT to QUEUED, once there is room; unless a custom store has refused the group.

        Into the built-in store in the order of the calls: a large group that waits for many bytes must not see small
        ones pass for ever.
        """
        self.waiting_puts += 1
        self._blocked.begin(self._ledger.clock())
        try:
            if self._builtin is None:
                await self.store.put(item)
            else:
                async with self._entrance:
                    await self._put_in_turn(item)
        finally:
            self.waiting_puts -= 1
            self._blocked.end(self._ledger.clock())
        key = item.entry
        if key.owner is Owner.IN_FLIGHT:  # a custom store may have refused it, or have handed it out already
            self._ledger.queue(key)

    def put_back(self, keys: Iterable[GroupKey]) -> None:
        """DRAINED to QUEUED, in front of everything else and in their order."""
        items = [DataBufferInput(key.prompt_group, key.group or [], key) for key in keys]
        for item in items:
            self._ledger.queue(item.entry)
        self.returned.extendleft(reversed(items))

    def restore(self, items: list[DataBufferInput]) -> None:
        """The finished groups of a snapshot, before anything else is here: into the store as far as it has room, so
        that its bound holds; the oldest, if they do not fit, in front of it."""
        left = len(items) if self._builtin is None else self._builtin.put_restored(items)
        self.returned.extend(items[:left])

    def ready(self) -> DataBufferInput | None:
        """The oldest group, None where that cannot be told without waiting."""
        if self.returned:
            self._one_taken.set()
            return self.returned.popleft()
        builtin = self._builtin
        if builtin is None or builtin.queue is None or builtin.queue.empty():
            return None
        return self._entered(builtin.get_nowait())

    async def _put_in_turn(self, item: DataBufferInput) -> None:
        while self._is_full_of_returned:
            self._one_taken.clear()
            await self._one_taken.wait()
        await self.store.put(item)

    @property
    def _is_full_of_returned(self) -> bool:
        """Whether what was given back or restored fills the capacity, together with what is in the built-in store."""
        builtin = self._builtin
        return (
            bool(self.returned)
            and builtin is not None
            and len(self.returned) + builtin.qsize() >= builtin.capacity_groups
        )

    async def wait(
        self, wait_for: Callable[[asyncio.Future[Any]], Awaitable[bool]], version: VersionLabel | None
    ) -> DataBufferInput | None:
        """The next group of the store. `wait_for(future)` returns whether the future is done, or else gives up; however
        it ends, no `get` is left behind, and no group is lost."""
        getting = asyncio.create_task(_get(self.store, version), name="fully-async next group")
        there = False
        try:
            there = await wait_for(getting)
        finally:
            if not there:
                await self._abandon(getting)
        return self._entered(getting.result()) if there else None

    async def _abandon(self, getting: asyncio.Task[Any]) -> None:
        if getting.cancel():  # a cancelled get leaves its group in the queue
            await asyncio.wait({getting})
        if not getting.cancelled() and getting.exception() is None:  # it has got one, which must not go down with it
            self.returned.append(self._entered(getting.result()))

    def _entered(self, item: Any) -> DataBufferInput:
        """The item with its entry in the books, which a pair from somebody else's hand gets now."""
        key: GroupKey | None = item.key if item.__class__ is DataBufferInput else None
        if key is None:
            prompt_group, group = item
            key = None if self._builtin is not None else self._ledger.find(prompt_group)
            if key is None:
                key = self._ledger.enter(prompt_group)
                take_stock(key, group)
            item = DataBufferInput(prompt_group, group, key)
        if key.owner is Owner.IN_FLIGHT:  # a custom store's `put` has not returned yet
            self._ledger.queue(key)
        return item  # type: ignore[no-any-return]


async def _get(store: DataBuffer, version: VersionLabel | None) -> Any:
    return await store.get(current_version=version)
