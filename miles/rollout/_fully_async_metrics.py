"""What one drain tells about itself: counts of what it did and the age of what it saw."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from miles.rollout._fully_async_ledger import RecycleReason
from miles.rollout.filter_hub.base_types import MetricGatherer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miles.rollout._fully_async_ledger import GroupKey
    from miles.rollout._fully_async_staleness import VersionSplit

logger = logging.getLogger(__name__)

_PREFIX = "rollout/fully_async"


@dataclass
class Staleness:
    """Mean and maximum of a number of ages, in weight versions."""

    count: int = 0
    total: int = 0
    maximum: int = 0

    def add(self, staleness: int) -> None:
        self.count += 1
        self.total += staleness
        if staleness > self.maximum:
            self.maximum = staleness

    def metrics(self, prefix: str) -> dict[str, float]:
        """`{prefix}avg_staleness` and `{prefix}max_staleness`; nothing where nothing was measured."""
        if not self.count:
            return {}
        return {
            f"{_PREFIX}/{prefix}avg_staleness": self.total / self.count,
            f"{_PREFIX}/{prefix}max_staleness": self.maximum,
        }


@dataclass
class Journey:
    """How the groups of a batch came to the trainer: sums over them."""

    timed: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    measured: int = 0
    versions_in_flight: int = 0
    versions_in_queue: int = 0

    def add_time(self, seconds: float) -> None:
        """From the end of generation to the trainer."""
        self.timed += 1
        self.seconds += seconds
        if seconds > self.longest:
            self.longest = seconds

    def metrics(self) -> dict[str, float]:
        """The key set is fixed; 0 where nothing was measured."""
        return {
            f"{_PREFIX}/completion_to_train_seconds_mean": self.seconds / max(1, self.timed),
            f"{_PREFIX}/completion_to_train_seconds_max": self.longest,
            f"{_PREFIX}/trained_staleness_in_flight_mean": self.versions_in_flight / max(1, self.measured),
            f"{_PREFIX}/trained_staleness_in_queue_mean": self.versions_in_queue / max(1, self.measured),
        }


@dataclass
class DrainReport:
    """Filled by one drain, read once when it hands over its batch.

    `measured` covers every group whose age was measured, recycled and dropped ones too; `trained` exactly those that
    are handed to the trainer.
    """

    recycled: Counter[RecycleReason] = field(default_factory=Counter)
    drops: MetricGatherer = field(default_factory=MetricGatherer)
    measured: Staleness = field(default_factory=Staleness)
    trained: Staleness = field(default_factory=Staleness)
    journey: Journey = field(default_factory=Journey)
    unknown_version_groups: int | None = None
    """Groups whose age was wanted and could not be told; None where no age was wanted."""

    unknown_version_samples: int = 0
    """The same for samples; a group's age can be told by its other samples."""

    def count_recycled(self, reason: RecycleReason, recycled: bool) -> None:
        """A group was turned down; `recycled`: it starts over, else it was dropped."""
        self.recycled[reason] += recycled

    def add_measured(self, staleness: int | None) -> None:
        """A group's age was wanted; None: it could not be told."""
        if self.unknown_version_groups is None:
            self.unknown_version_groups = 0
        if staleness is None:
            self.unknown_version_groups += 1
        else:
            self.measured.add(staleness)

    def add_trained(self, keys: Iterable[GroupKey], split: VersionSplit, now: float) -> None:
        """These are handed to the trainer now."""
        trained, journey = self.trained, self.journey
        for key in keys:
            if key.staleness is not None:
                trained.add(key.staleness)
                in_flight, in_queue = split.of(key)
                journey.measured += 1
                journey.versions_in_flight += in_flight
                journey.versions_in_queue += in_queue
            if key.finished_at is not None:  # else somebody else has generated it, or the run before this one
                journey.add_time(now - key.finished_at)

    def forget_ages(self) -> None:
        """The drain failed and its groups will be measured again; what it recycled and dropped stays counted."""
        self.measured, self.trained = Staleness(), Staleness()
        self.unknown_version_groups, self.unknown_version_samples = None, 0

    def warn_about_unknown_versions(self, max_weight_staleness: int | None) -> None:
        if max_weight_staleness is not None and self.unknown_version_groups:
            logger.warning(
                "--max-weight-staleness %d could not be applied to %d groups of this batch: they carry no numeric "
                "weight version, or the current one is not known",
                max_weight_staleness,
                self.unknown_version_groups,
            )

    def metrics(self, *, queue_size: int) -> dict[str, float]:
        """`queue_size`: finished groups that are left waiting.

        The key set is fixed for a configuration: staleness keys appear where ages are measured.
        """
        unknown = self.unknown_version_groups
        return {
            f"{_PREFIX}/queue_size": queue_size,
            f"{_PREFIX}/aborted_groups_recycled": self.recycled[RecycleReason.ABORTED],
            f"{_PREFIX}/stale_groups_recycled": self.recycled[RecycleReason.STALE],
            f"{_PREFIX}/unknown_version_samples": self.unknown_version_samples,
            **({} if unknown is None else {f"{_PREFIX}/unknown_version_groups": unknown}),
            **self.measured.metrics(""),
            **self.trained.metrics("trained_"),
            **self.journey.metrics(),
            **self.drops.collect(),
        }
