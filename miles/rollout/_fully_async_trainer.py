"""The trainer as the rollout sees it: which weights it has, which batches, and so which groups may start.

hand_over(n) ---> the trainer has batch n ---> acknowledge(n): TRAINED
                                          +--> give_back(n): back in the queue
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.rollout._fully_async_admission import Admission
from miles.rollout._fully_async_versions import VersionLabel, WeightVersions

if TYPE_CHECKING:
    from miles.rollout._fully_async_config import FullyAsyncConfig
    from miles.rollout._fully_async_ledger import GroupKey, GroupLedger


@dataclass(frozen=True)
class _Batch:
    keys: list[GroupKey]
    version_serial: int
    """Which version the trainer had when it got the batch."""


class TrainerSide:
    """Its version is known once it was published, or while a call has it with it; a published one stays known."""

    def __init__(self, config: FullyAsyncConfig, ledger: GroupLedger) -> None:
        self.versions = WeightVersions()
        self.version_known = False
        self.version: VersionLabel | None = None
        """The current one, None where it is not known."""

        self._admission = Admission(
            limit=config.max_weight_staleness,
            update_interval=config.update_weights_interval,
            batch_size=config.rollout_batch_size,
        )
        self._ledger = ledger
        self._batches: dict[int, _Batch] = {}
        self._groups = 0  # in all of them
        self._publishes = False
        self._acknowledges = False

    @property
    def has_batch(self) -> bool:
        """Whether a batch is between its hand-over and its step."""
        return bool(self._batches)

    def admits(self, most: int) -> int:
        """How many of `most` more groups may start, as far as the trainer is concerned."""
        if not self.version_known:
            return most
        ledger = self._ledger
        return self._admission.admits(ledger.in_flight + ledger.queued + ledger.drained - self._groups, most)

    def publish(self, version: VersionLabel) -> None:
        """The engines have the trainer's weights of this version."""
        self._publishes = True
        self._change(version)
        self._know(True)

    def begin_call(self, rollout_id: int, version: VersionLabel | None) -> list[GroupKey]:
        """A batch is asked for. The groups to queue again: those of an open batch of the same rollout, which was not
        trained on if it is asked for again. Without acknowledgements, every open batch is closed."""
        again: list[GroupKey] = []
        if self._acknowledges:
            again = self.give_back(rollout_id)
        else:
            for earlier in list(self._batches):
                self._close(earlier)
        self._admission.call_begins()
        if version is not None and (not self._publishes or self.versions.is_newer(version)):
            self._change(version)
        self._know(self._publishes or version is not None)
        return again

    def hand_over(self, rollout_id: int, keys: list[GroupKey]) -> None:
        self._batches[rollout_id] = _Batch(keys, self.versions.serial)
        self._groups += len(keys)
        self._admission.handed += len(keys)

    def acknowledge(self, rollout_id: int) -> int:
        """The step is done: how many groups it trained on; 0 where there is no such batch (any more)."""
        self._acknowledges = True
        return self._close(rollout_id)

    def give_back(self, rollout_id: int) -> list[GroupKey]:
        """The step is not done and will not be: its groups; none where there is no such batch (any more)."""
        self._acknowledges = True
        batch = self._batches.pop(rollout_id, None)
        if batch is None:
            return []
        self._groups -= len(batch.keys)
        if batch.version_serial == self.versions.serial:
            self._admission.takes_back(len(batch.keys))
        return batch.keys

    def _close(self, rollout_id: int) -> int:
        batch = self._batches.pop(rollout_id, None)
        if batch is None:
            return 0
        self._groups -= len(batch.keys)
        for key in batch.keys:
            self._ledger.train(key)
        return len(batch.keys)

    def _know(self, known: bool) -> None:
        self.version_known = known
        self.version = self.versions.current if known else None

    def _change(self, version: VersionLabel) -> None:
        if self.versions.publish(version):
            self._admission.version_changes()
