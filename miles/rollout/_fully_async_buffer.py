"""The store of finished groups: between generation, which puts, and the drain, which gets.

`--custom-async-data-buffer-path` replaces it by a class of one's own, built as `cls(DataBufferConstructorInput)`:

    class NewestFirst:
        def __init__(self, input): ...
        async def put(self, item): ...           # may wait: generation pauses meanwhile
        async def get(self, **context): ...      # waits for a group and returns an item that was put
        def get_metrics(self): ...               # numbers for this step's metrics; called once a batch

`context` has `current_version`, the trainer's, None where it is not known. A `get` may be cancelled while it waits, and
must end then without having taken a group. A store that refuses a group must say so, from `put` or from `get`, or the
group counts as queued for ever: `unused_handler_fn(prompt_group)` has it generated again (or dropped, by
`--async-unused-samples-handler`), `drop_fn(prompt_group)` drops it. The drain judges what it gets in any case.

Finished groups of a restored run, and those of a batch that was given back, wait beside the store and are drained
before it is asked. While they do, a group is put only where they and the store hold fewer than `capacity_groups`
together; they do not count in `capacity_bytes`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from miles.rollout._fully_async_ledger import GroupKey
from miles.utils.misc import load_function

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from miles.rollout._fully_async_groups import Group, PromptGroup
    from miles.rollout._fully_async_refusals import Refusals


@dataclass(frozen=True)
class DataBufferConstructorInput:
    """What a store is built from."""

    args: Namespace
    unused_handler_fn: Callable[[PromptGroup], None]
    drop_fn: Callable[[PromptGroup], None]
    capacity_groups: int
    """Groups that should wait at most; the flags' value, for the store to keep."""

    capacity_bytes: int | None
    """Estimated bytes that should wait at most, None for any number."""


class DataBufferInput(tuple[Any, Any]):
    """A finished group: `(prompt_group, group)`. `key` is its entry in the books; None where somebody else made it."""

    key: GroupKey | None

    def __new__(cls, prompt_group: PromptGroup, group: Group, key: GroupKey | None = None) -> DataBufferInput:
        self = tuple.__new__(cls, (prompt_group, group))
        self.key = key
        return self

    @property
    def prompt_group(self) -> PromptGroup:
        return self[0]  # type: ignore[no-any-return]

    @property
    def group(self) -> Group:
        return self[1]  # type: ignore[no-any-return]


class DataBuffer(Protocol):
    """The contract; see the module docstring."""

    async def put(self, item: DataBufferInput) -> None: ...

    async def get(self, **context: Any) -> DataBufferInput: ...

    def get_metrics(self) -> dict[str, Any]: ...


class DefaultDataBuffer:
    """First in, first out. `put` waits while `capacity_groups` groups are queued, or while their bytes and the new
    group's exceed `capacity_bytes`; a group that exceeds it alone is let in once the queue is empty.

    `queue` holds `(prompt_group, group)` pairs and may be replaced; what others put into it has no size.
    """

    def __init__(self, input: DataBufferConstructorInput) -> None:
        self.capacity_groups = input.capacity_groups
        self.capacity_bytes = input.capacity_bytes
        self.queue: asyncio.Queue[Any] | None = None
        self.size_bytes = 0
        self._shrunk = asyncio.Event()

    def open(self) -> asyncio.Queue[Any]:
        if self.queue is None:
            self.queue = asyncio.Queue(maxsize=self.capacity_groups)
        return self.queue

    def qsize(self) -> int:
        return 0 if self.queue is None else self.queue.qsize()

    async def put(self, item: DataBufferInput | GroupKey) -> None:
        size = _size(item)
        if self.capacity_bytes is not None:
            while self.size_bytes and self.size_bytes + size > self.capacity_bytes:
                self._shrunk.clear()
                await self._shrunk.wait()
        self.size_bytes += size  # reserved before the wait for a place, so that others that wait see it
        try:
            await self.open().put(item)
        except BaseException:
            self._shrink(size)
            raise

    async def get(self, **context: Any) -> Any:
        item = await self.open().get()
        self._shrink(_size(item))
        return item

    def get_nowait(self) -> Any:
        """The oldest group. Raises asyncio.QueueEmpty."""
        item = (self.queue or self.open()).get_nowait()
        self.size_bytes -= item.size_bytes if item.__class__ is GroupKey else _size(item)
        if self.capacity_bytes is not None:
            self._shrunk.set()
        return item

    def get_metrics(self) -> dict[str, Any]:
        return {}

    def _shrink(self, size: int) -> None:
        self.size_bytes -= size
        if self.capacity_bytes is not None:
            self._shrunk.set()


def _size(item: Any) -> int:
    """Estimated bytes; 0 for what others have put into the queue."""
    key: Any = getattr(item, "key", None) if isinstance(item, DataBufferInput) else item
    return key.size_bytes if isinstance(key, GroupKey) else 0


def build_store(args: Namespace, refusals: Refusals, capacity_groups: int) -> DataBuffer:
    """The store that the flags name, the built-in one by default."""
    store: Any = load_function(getattr(args, "custom_async_data_buffer_path", None)) or DefaultDataBuffer
    constructor_input = DataBufferConstructorInput(
        args=args,
        unused_handler_fn=refusals.unused_by_store,
        drop_fn=refusals.dropped_by_store,
        capacity_groups=capacity_groups,
        capacity_bytes=getattr(args, "async_data_buffer_max_bytes", None),
    )
    return store(constructor_input)  # type: ignore[no-any-return]
