"""The batches that the trainer has and has not acknowledged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles.rollout._fully_async_buffer import DataBufferInput


@dataclass(frozen=True)
class Batch:
    items: list[DataBufferInput]
    version_serial: int
    """Which version the trainer had when it got the batch."""


class HandedBatches:
    """One batch per rollout id. `size`: the groups of all of them."""

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}
        self.size = 0

    def add(self, rollout_id: int, batch: Batch) -> None:
        self._batches[rollout_id] = batch
        self.size += len(batch.items)

    def take(self, rollout_id: int) -> Batch | None:
        """The batch, which is no longer kept here; None where there is none (any more)."""
        batch = self._batches.pop(rollout_id, None)
        if batch is not None:
            self.size -= len(batch.items)
        return batch

    def rollout_ids(self) -> list[int]:
        return list(self._batches)
