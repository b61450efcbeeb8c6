"""The real data source over prompts in memory, with an observer at its two doors."""

from __future__ import annotations

import random
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.sim.faults import FaultBook, SimulatedError
from miles.sim.schedule import FaultKind
from miles.utils.types import Sample

if TYPE_CHECKING:
    from miles.sim.observer import Observer


class MemoryDataset:
    """`size` prompts, "p0" and so on; `shuffle(epoch)` orders them by seed and epoch alone."""

    def __init__(self, size: int, seed: int) -> None:
        self.origin = [Sample(prompt=f"p{i}", label=str(i)) for i in range(size)]
        self.samples = self.origin
        self._seed = seed
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self.origin)

    def shuffle(self, epoch_id: int) -> None:
        if epoch_id == self._epoch:
            return
        self._epoch = epoch_id
        self.samples = list(self.origin)
        random.Random(self._seed + epoch_id).shuffle(self.samples)


class SimulatedDataSource(RolloutDataSourceWithBuffer):
    """Tells the observer what is pulled and what comes back. `observer` is None once its process has been killed.

    After `data_groups` groups there are none but those that come back.
    """

    def __init__(
        self,
        args: Namespace,
        dataset: MemoryDataset,
        faults: FaultBook,
        observer: Observer,
        data_groups: int | None = None,
    ) -> None:
        super().__init__(Namespace(**{**vars(args), "rollout_global_dataset": False}))
        self.dataset: Any = dataset
        self._order_epoch()
        self._faults = faults
        self._data_groups = data_groups
        self.observer: Observer | None = observer

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        self._may_raise()
        return [] if self._has_ended and not self.buffer else self._observed(super().get_samples(num_samples))

    def get_fresh_samples(self, num_samples: int) -> list[list[Sample]]:
        self._may_raise()
        return [] if self._has_ended else self._observed(super().get_fresh_samples(num_samples))

    def _may_raise(self) -> None:
        if self.observer is not None and (fault := self._faults.at_group(self._next_index, FaultKind.SOURCE_RAISES)):
            error = SimulatedError(f"{fault}")
            self.observer.fatal(error)
            raise error

    def _observed(self, groups: list[list[Sample]]) -> list[list[Sample]]:
        for group in groups if self.observer is not None else ():
            self.observer.pulled(group)  # type: ignore[union-attr]
        return groups

    @property
    def _has_ended(self) -> bool:
        return self._data_groups is not None and self._next_index >= self._data_groups

    @property
    def _next_index(self) -> int:
        return int(self.sample_group_index)

    def add_samples(self, samples: list[list[Sample]]) -> None:
        for group in samples if self.observer is not None else ():
            self.observer.returned(group)  # type: ignore[union-attr]
        super().add_samples(samples)
