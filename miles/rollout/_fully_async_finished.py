"""Finished groups between generation and the drain: the store, and in front of it what was taken and given back.

put ---> line, while there is no room ---> store (first in, first out, or a custom one) ---> take
                   put_back, restore ---> returned (first) ------------------------------------^

Who takes a group gives its place to the first in the line, in the same step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from miles.rollout._fully_async_buffer import DataBuffer, DataBufferInput, DefaultDataBuffer
from miles.rollout._fully_async_groups import take_stock
from miles.rollout._fully_async_ledger import GroupKey, Owner
from miles.utils.user_calls import name_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from miles.rollout._fully_async_ledger import GroupLedger
    from miles.rollout._fully_async_versions import VersionLabel
    from miles.rollout._fully_async_window import ActiveTime

logger = logging.getLogger("miles.rollout.fully_async_rollout")

ABANDON_SECS = 5.0
_QUEUED = Owner.QUEUED


class FinishedGroups:
    """`blocked` learns when a group waits for room."""

    def __init__(self, store: DataBuffer, ledger: GroupLedger, blocked: ActiveTime, capacity_groups: int) -> None:
        self.store = store
        self.capacity_groups = capacity_groups
        self.returned: deque[GroupKey] = deque()
        self.waiting_puts = 0
        """Finished groups that wait for room."""

        self._builtin = store if store.__class__ is DefaultDataBuffer else None
        self._ledger = ledger
        self._line: deque[tuple[GroupKey, asyncio.Future[None]]] = deque()
        self._returned_bytes = 0
        self._blocked = blocked

    @property
    def size(self) -> int:
        """Groups that wait for the trainer."""
        return self._ledger.queued if self._builtin is None else len(self.returned) + self._builtin.qsize()

    @property
    def size_bytes(self) -> int:
        """Estimated bytes of the groups that wait for the trainer."""
        if self._builtin is None:
            return sum(key.size_bytes for key in self._ledger.held_by(_QUEUED))
        return self._builtin.size_bytes + self._returned_bytes

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

    # ---- in

    def put_at_once(self, key: GroupKey, *, first_in_line: bool = False) -> bool:
        """`put` where that need not wait; else nothing happens: there is no room in the built-in store, of which what
        was given back takes up its part, or others wait for it."""
        builtin = self._builtin
        if builtin is None or builtin.queue is None or (self._line and not first_in_line):
            return False
        if (self.returned or builtin.capacity_bytes is not None) and not self._has_room(key, builtin):
            return False
        try:
            builtin.queue.put_nowait(key)
        except asyncio.QueueFull:
            return False
        builtin.size_bytes += key.size_bytes
        self._ledger.queue(key)
        return True

    async def put(self, key: GroupKey) -> None:
        """IN_FLIGHT to QUEUED, once there is room; unless a custom store has refused the group.

        Into the built-in store in the order of the calls: a large group that waits for many bytes must not see small
        ones pass for ever. A custom store is asked once what was given back leaves room for one more group beside it.
        """
        if not self.waiting_puts:
            self._blocked.begin(self._ledger.clock())
        self.waiting_puts += 1
        try:
            if self._builtin is None:
                if self.returned and (self._line or self._ledger.queued >= self.capacity_groups):
                    await self._stand_in_line(key)
                await self.store.put(DataBufferInput(key.prompt_group, key.group or [], key))
                if key.owner is Owner.IN_FLIGHT:  # else it was refused, or has been handed out already
                    self._ledger.queue(key)
            else:
                await self._stand_in_line(key)
        except asyncio.CancelledError:
            if self._builtin is not None:
                self._fill()  # there may be room for the next one in the line, if that is smaller
            raise
        finally:
            self.waiting_puts -= 1
            if not self.waiting_puts:
                self._blocked.end(self._ledger.clock())

    async def _stand_in_line(self, key: GroupKey) -> None:
        let_in: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((key, let_in))
        await let_in

    def _fill(self) -> None:
        """A group was taken. Let in those that stand in line, in order, as far as there is room: for each IN_FLIGHT to
        QUEUED; into a custom store one, and all once nothing is left of what was given back."""
        line = self._line
        while line and self._builtin is None:
            if self.returned and self._ledger.queued > self.capacity_groups:  # the group that was taken included
                return
            _, let_in = line.popleft()
            if not let_in.done():  # else its task was cancelled
                let_in.set_result(None)
                if self.returned:
                    return
        while line:
            key, let_in = line[0]
            if not let_in.done():  # else its task was cancelled
                if not self.put_at_once(key, first_in_line=True):
                    return
                let_in.set_result(None)
            line.popleft()

    def _has_room(self, key: GroupKey, builtin: DefaultDataBuffer) -> bool:
        """Whether neither groups nor bytes are too many with this one; a group that is too large alone may enter."""
        groups = len(self.returned) + builtin.qsize()
        if not groups:
            return True
        most_bytes = builtin.capacity_bytes
        return groups < builtin.capacity_groups and (
            most_bytes is None or self.size_bytes + key.size_bytes <= most_bytes
        )

    # ---- back, in front

    def put_back(self, keys: Iterable[GroupKey]) -> None:
        """DRAINED to QUEUED, in front of everything else and in their order."""
        keys = list(keys)
        for key in keys:
            self._ledger.queue(key)
            self._returned_bytes += key.size_bytes
        self.returned.extendleft(reversed(keys))

    def restore(self, keys: Iterable[GroupKey]) -> None:
        """The finished groups of a snapshot, QUEUED and oldest first, before anything else is here. They may be more
        than there is room for, by the batch that the trainer had: none enters until they are fewer."""
        for key in keys:
            self._give_back(key)

    def _give_back(self, key: GroupKey) -> None:
        self.returned.append(key)
        self._returned_bytes += key.size_bytes

    # ---- out

    def ready(self) -> GroupKey | None:
        """The oldest group, None where that cannot be told without waiting."""
        if self.returned:
            key = self.returned.popleft()
            self._returned_bytes -= key.size_bytes
        elif self._builtin is None:
            return None
        else:
            try:
                item = self._builtin.get_nowait()
            except asyncio.QueueEmpty:
                return None
            key = item if item.__class__ is GroupKey else self._entered(item)
        if self._line:
            self._fill()
        return key

    async def wait(
        self, wait_for: Callable[[asyncio.Future[Any]], Awaitable[bool]], version: VersionLabel | None
    ) -> GroupKey | None:
        """The next group of the store. `wait_for(future)` returns whether the future is done, or else gives up; however
        it ends, no `get` is left behind unless it ignores its cancellation, and no group is lost."""
        getting = asyncio.create_task(_get(self.store, version), name="fully-async next group")
        there = False
        try:
            there = await wait_for(getting)
        finally:
            if not there:
                await self._abandon(getting)
        if not there:
            return None
        key = self._entered(getting.result())
        self._fill()
        return key

    async def _abandon(self, getting: asyncio.Task[Any]) -> None:
        """Cancel this `get`, and wait until it has ended, for at most ABANDON_SECS: it is user code, which may hold on
        to its cancellation. Whenever it ends, a group that it returns is given back."""
        if not getting.cancel():
            self._rescue(getting)
            return
        getting.add_done_callback(self._rescue)
        _, left = await asyncio.wait({getting}, timeout=ABANDON_SECS)
        if left:
            logger.error(
                "get of the data buffer %s still runs %g s after it was cancelled; it is left behind",
                name_of(self.store),
                ABANDON_SECS,
            )

    def _rescue(self, getting: asyncio.Task[Any]) -> None:
        if not getting.cancelled() and getting.exception() is None:  # a cancelled one leaves its group in the queue
            self._give_back(self._entered(getting.result()))

    def _entered(self, item: Any) -> GroupKey:
        """The item's entry in the books, which a pair from somebody else's hand gets now."""
        key = item.key if isinstance(item, DataBufferInput) else item
        if not isinstance(key, GroupKey):
            prompt_group, group = item
            known = None if self._builtin is not None else self._ledger.find(prompt_group)
            if known is None:
                key = self._ledger.enter(prompt_group)
                take_stock(key, group)
            else:
                key = known
        if key.owner is Owner.IN_FLIGHT:  # a custom store's `put` has not returned yet
            self._ledger.queue(key)
        return key


async def _get(store: DataBuffer, version: VersionLabel | None) -> Any:
    return await store.get(current_version=version)
