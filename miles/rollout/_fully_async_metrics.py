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

    from miles.rollout._fully_async_ledger import GroupKey, GroupLedger

logger = logging.getLogger(__name__)

_PREFIX = "rollout/fully_async"
_SUMS = ("generated_samples", "generated_tokens", "trained_samples", "trained_tokens")


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

    unknown_version_samples: int = 0
    """The same for samples; a group's age can be told by its other samples."""

    def count_recycled(self, reason: RecycleReason, recycled: bool) -> None:
        """A group was turned down; `recycled`: it starts over, else it was dropped."""
        self.recycled[reason] += recycled

    def add_measured(self, staleness: int | None) -> None:
        """A group's age was wanted; None: it could not be told."""
        self.unknown_version_groups = (self.unknown_version_groups or 0) + (staleness is None)
        if staleness is not None:
            self.measured.add(staleness)

    def add_trained(self, keys: Iterable[GroupKey]) -> None:
        for key in keys:
            if key.staleness is not None:
                self.trained.add(key.staleness)

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
            **self.drops.collect(),
        }


class LedgerWindow:
    """What the books have counted since the last report: one per rollout function, `metrics` once a step."""

    def __init__(self, ledger: GroupLedger) -> None:
        self._ledger = ledger
        self._before = self._read()

    def metrics(self, *, in_flight_samples: int, in_flight_bound: int, queue_bytes: int) -> dict[str, float]:
        """The key set is fixed. Mean lengths are of samples; 0 where there were none."""
        now = self._read()
        since = {name: now[name] - self._before[name] for name in now}
        self._before = now
        sums = {name: since.pop(name) for name in _SUMS}
        since |= {
            "tokens_generated": sums["generated_tokens"],
            "tokens_trained": sums["trained_tokens"],
            "response_len_generated_mean": _ratio(sums["generated_tokens"], sums["generated_samples"]),
            "response_len_trained_mean": _ratio(sums["trained_tokens"], sums["trained_samples"]),
            "in_flight_samples": in_flight_samples,
            "in_flight_bound": in_flight_bound,
            "queue_bytes": queue_bytes,
        }
        return {f"{_PREFIX}/{name}": value for name, value in since.items()}

    def _read(self) -> dict[str, float]:
        ledger = self._ledger
        return {
            "groups_pulled": ledger.pulled,
            "groups_trained": ledger.trained,
            **{f"groups_recycled_{reason.value}": count for reason, count in ledger.recycled_by.items()},
            **{f"groups_dropped_{reason.value}": count for reason, count in ledger.dropped_by.items()},
            **{f"tokens_wasted_{reason}": tokens for reason, tokens in ledger.wasted_tokens.items()},
            **{name: getattr(ledger, name) for name in _SUMS},
        }


def _ratio(total: float, count: float) -> float:
    return total / count if count else 0.0
