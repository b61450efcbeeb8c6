"""What one drain tells about itself: counts of what it did and the age of what it saw."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from miles.rollout.filter_hub.base_types import MetricGatherer

logger = logging.getLogger(__name__)

_PREFIX = "rollout/fully_async"


class RecycleReason(Enum):
    """Why a finished group went back to the data source."""

    ABORTED = "aborted"
    STALE = "stale"

    @property
    def metric_key(self) -> str:
        return f"{_PREFIX}/{self.value}_groups_recycled"


@dataclass
class Staleness:
    """Mean and maximum of a number of ages, in weight versions."""

    count: int = 0
    total: int = 0
    maximum: int = 0

    def add(self, staleness: int) -> None:
        self.count += 1
        self.total += staleness
        self.maximum = max(self.maximum, staleness)

    def metrics(self, prefix: str) -> dict[str, float]:
        """`{prefix}avg_staleness` and `{prefix}max_staleness`; nothing where nothing was measured."""
        if not self.count:
            return {}
        return {
            f"{_PREFIX}/{prefix}avg_staleness": self.total / self.count,
            f"{_PREFIX}/{prefix}max_staleness": self.maximum,
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
    unknown_version_groups: int | None = None
    """Groups whose age was wanted and could not be told; None where no age was wanted."""

    def forget_ages(self) -> None:
        """The drain failed and its groups will be measured again; what it recycled and dropped stays counted."""
        self.measured, self.trained, self.unknown_version_groups = Staleness(), Staleness(), None

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
            **{reason.metric_key: self.recycled[reason] for reason in RecycleReason},
            **({} if unknown is None else {f"{_PREFIX}/unknown_version_groups": unknown}),
            **self.measured.metrics(""),
            **self.trained.metrics("trained_"),
            **self.drops.collect(),
        }
