"""How stale groups are, and whether that is within `--max-weight-staleness`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.rollout._fully_async_groups import describe, samples_of
from miles.rollout._fully_async_versions import version_number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miles.rollout._fully_async_ledger import GroupKey
    from miles.rollout._fully_async_metrics import DrainReport
    from miles.rollout._fully_async_versions import VersionLabel, WeightVersions


@dataclass(frozen=True)
class _Age:
    staleness: int | None
    all_known: bool


_MOST_CACHED = 1024


class StalenessGauge:
    """Measures groups against a current version: the trainer's, or what the engines report.

    Most groups carry one of a few sets of versions, so their ages are kept until the current version changes.
    """

    def __init__(self, versions: WeightVersions, *, limit: int | None, strict: bool) -> None:
        self._versions = versions
        self._limit = limit
        self._strict = strict
        self._ages: dict[tuple[int | str, ...], _Age] = {}
        self._against: VersionLabel | None = None
        self._serial = -1

    def is_fresh(self, key: GroupKey, current: VersionLabel | None, report: DrainReport) -> bool:
        """Measure the group; whether it is within the limit. Where its age cannot be told it is, and is counted.

        A group that is newer than `current` is fresh (0): the weights moved on after that was taken. Raises ValueError
        naming a sample of unknown age where that is wanted.
        """
        serial = self._versions.serial
        known = serial == self._serial and current == self._against
        age = (self._ages.get(key.versions) if known else None) or self._age(key.versions, current)
        key.staleness = staleness = age.staleness
        key.measured_serial = serial
        if key.unversioned or not age.all_known:
            self._note_unknown(key, current, report)
        report.ages[staleness] += 1
        return self._limit is None or staleness is None or staleness <= self._limit

    def is_within_limit(self, labels: tuple[int | str, ...], current: VersionLabel | None) -> bool:
        """Whether what these versions wrote is, as far as can be told, not too old. Notes nothing."""
        staleness = self._age(labels, current).staleness
        return self._limit is None or staleness is None or staleness <= self._limit

    def outdated(self, keys: Iterable[GroupKey]) -> list[GroupKey]:
        """Those that were measured against another version than the trainer's."""
        serial = self._versions.serial
        return [key for key in keys if key.measured_serial != serial]

    def _age(self, labels: tuple[int | str, ...], current: VersionLabel | None) -> _Age:
        if current is None:
            return _Age(None, all_known=False)
        if current != self._against or self._versions.serial != self._serial:
            self._ages.clear()
            self._against, self._serial = current, self._versions.serial
        age = self._ages.get(labels)
        if age is None:
            if len(self._ages) > _MOST_CACHED:
                self._ages.clear()
            ages = [self._versions.age(label, current) for label in labels]
            known = [a for a in ages if a is not None]
            age = self._ages[labels] = _Age(max(known, default=None), all_known=len(known) == len(ages))
        return age

    def _note_unknown(self, key: GroupKey, current: VersionLabel | None, report: DrainReport) -> None:
        """Count the samples that carry no version, or one whose age cannot be told; or raise for the first of them."""
        assert key.group is not None
        for sample in samples_of(key.group):
            labels = sample.weight_versions
            if labels and self._age(tuple(labels), current).all_known:
                continue
            report.unknown_version_samples += 1
            if self._strict:
                raise ValueError(
                    f"--strict-weight-versions: sample {sample.index} of {describe(key.prompt_group)} has the weight "
                    f"versions {labels}; the trainer's current one is {current!r}, and it must have published them all"
                )


class VersionSplit:
    """Where the staleness of groups comes from: versions that passed while they were generated, and while they waited.

    A group waits from the version that the trainer had when generation ended, or from the newest one that wrote a token
    where that came later. The two numbers add up to the group's staleness. For one batch, against one `current` version
    (None: the trainer's is not known, and the groups were measured against what the engines reported).
    """

    def __init__(self, versions: WeightVersions, current: VersionLabel | None) -> None:
        self._versions = versions
        self._current = current

    def of(
        self, versions: tuple[VersionLabel, ...], finished_version: VersionLabel | None, staleness: int
    ) -> tuple[int, int]:
        """(in flight, in the queue) of a group with these."""
        waited = self._since_finished(versions, finished_version, staleness)
        return staleness - waited, waited

    def _since_finished(
        self, versions: tuple[VersionLabel, ...], finished_version: VersionLabel | None, staleness: int
    ) -> int:
        if self._current is None:
            numbers = [n for label in versions if (n := version_number(label)) is not None]
            return max(0, staleness - (max(numbers) - min(numbers) if numbers else 0))
        labels = versions if finished_version is None else (*versions, finished_version)
        ages = (self._versions.age(label, self._current) for label in labels)
        return min(staleness, min((age for age in ages if age is not None), default=staleness))
