"""What one drain tells about itself: counts of what it did and the age of what it saw."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from miles.rollout._fully_async_ledger import RecycleReason
from miles.rollout.filter_hub.base_types import MetricGatherer

if TYPE_CHECKING:
    from miles.rollout._fully_async_ledger import GroupKey
    from miles.rollout._fully_async_staleness import VersionSplit

logger = logging.getLogger(__name__)

_PREFIX = "rollout/fully_async"
_situation = attrgetter("versions", "finished_version", "staleness")  # the groups of a batch are mostly alike


@dataclass
class Journey:
    """How the groups of a batch came to the trainer: sums over them."""

    timed: int = 0
    seconds: float = 0.0
    """From the end of generation to the trainer."""

    longest: float = 0.0
    measured: int = 0
    versions_in_flight: int = 0
    versions_in_queue: int = 0

    @classmethod
    def of(cls, keys: list[GroupKey], split: VersionSplit, now: float) -> Journey:
        """Of these groups, which are handed to the trainer now."""
        # None: somebody else has generated it, or the run before this one
        times = [now - key.finished_at for key in keys if key.finished_at is not None]
        journey = cls(len(times), sum(times), max(times, default=0.0))
        for (versions, finished_version, staleness), groups in Counter(map(_situation, keys)).items():
            if staleness is not None:
                in_flight, in_queue = split.of(versions, finished_version, staleness)
                journey.measured += groups
                journey.versions_in_flight += groups * in_flight
                journey.versions_in_queue += groups * in_queue
        return journey

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

    Ages are in weight versions, each with its number of groups; None: it was wanted and could not be told.
    """

    recycled: Counter[RecycleReason] = field(default_factory=Counter)
    drops: MetricGatherer = field(default_factory=MetricGatherer)
    ages: Counter[int | None] = field(default_factory=Counter)
    """Of every group whose age was wanted, recycled and dropped ones too."""

    trained_ages: Counter[int | None] = field(default_factory=Counter)
    """Of those that are handed to the trainer."""

    journey: Journey = field(default_factory=Journey)
    unknown_version_samples: int = 0
    """Samples whose age was wanted and could not be told; their group's can be told by others."""

    @property
    def unknown_version_groups(self) -> int | None:
        """None where no age was wanted."""
        return self.ages[None] if self.ages else None

    def count_recycled(self, reason: RecycleReason, recycled: bool) -> None:
        """A group was turned down; `recycled`: it starts over, else it was dropped."""
        self.recycled[reason] += recycled

    def add_trained(self, keys: list[GroupKey], split: VersionSplit, now: float) -> None:
        """These are handed to the trainer now."""
        self.trained_ages.update(map(attrgetter("staleness"), keys))
        self.journey = Journey.of(keys, split, now)

    def forget_ages(self) -> None:
        """The drain failed and its groups will be measured again; what it recycled and dropped stays counted."""
        self.ages.clear()
        self.unknown_version_samples = 0

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
            **_staleness(self.ages, ""),
            **_staleness(self.trained_ages, "trained_"),
            **self.journey.metrics(),
            **self.drops.collect(),
        }


def _staleness(ages: Counter[int | None], prefix: str) -> dict[str, float]:
    """`{prefix}avg_staleness` and `{prefix}max_staleness`; nothing where nothing was measured."""
    known = {age: groups for age, groups in ages.items() if age is not None}
    if not known:
        return {}
    return {
        f"{_PREFIX}/{prefix}avg_staleness": sum(age * groups for age, groups in known.items()) / sum(known.values()),
        f"{_PREFIX}/{prefix}max_staleness": max(known),
    }
