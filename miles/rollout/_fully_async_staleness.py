"""How stale groups are, and whether that is within `--max-weight-staleness`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.rollout._fully_async_groups import describe, samples_of

if TYPE_CHECKING:
    from miles.rollout._fully_async_ledger import GroupKey
    from miles.rollout._fully_async_metrics import DrainReport
    from miles.rollout._fully_async_versions import VersionLabel, WeightVersions


class StalenessGauge:
    """Measures groups against a current version: the trainer's, or what the engines report."""

    def __init__(self, versions: WeightVersions, *, limit: int | None, strict: bool) -> None:
        self._versions = versions
        self._limit = limit
        self._strict = strict

    def is_fresh(
        self, key: GroupKey, oldest_number: int | None, current: VersionLabel | None, report: DrainReport
    ) -> bool:
        """Measure the group; whether it is within the limit. Where its age cannot be told it is, and is counted.

        `oldest_number`: the group's oldest numeric version. A group that is newer than `current` is fresh (0): the
        weights moved on after that was taken. Raises ValueError naming a sample of unknown age where that is wanted.
        """
        if self._strict:
            self._require_known(key, current)
        key.staleness = self._staleness(key, oldest_number, current)
        key.measured_serial = self._versions.serial
        report.add_measured(key.staleness, self._unknown_samples(key, current))
        return self._limit is None or key.staleness is None or key.staleness <= self._limit

    def is_up_to_date(self, key: GroupKey) -> bool:
        """Whether the trainer's version is the one that the group was measured against."""
        return key.measured_serial == self._versions.serial

    def _staleness(self, key: GroupKey, oldest_number: int | None, current: VersionLabel | None) -> int | None:
        if current is None:
            return None
        numeric = None if oldest_number is None else self._versions.age(oldest_number, current)
        if numeric is not None and len(key.versions) == 1:
            return numeric
        other = self._versions.oldest_age(key.versions, current)
        return numeric if other is None else max(other, numeric or 0)

    def _unknown_samples(self, key: GroupKey, current: VersionLabel | None) -> int:
        """Samples that carry no version, or one whose age cannot be told."""
        if not key.unversioned and self._all_known(key.versions, current):
            return 0
        assert key.group is not None
        return sum(
            not sample.weight_versions or not self._all_known(sample.weight_versions, current)
            for sample in samples_of(key.group)
        )

    def _require_known(self, key: GroupKey, current: VersionLabel | None) -> None:
        where = describe(key.prompt_group)
        if current is None:
            raise ValueError(f"--strict-weight-versions: the current weight version is not known, to judge {where}")
        if not key.unversioned and self._all_known(key.versions, current):
            return
        assert key.group is not None
        for sample in samples_of(key.group):
            if not sample.weight_versions:
                raise ValueError(f"--strict-weight-versions: sample {sample.index} of {where} has no weight version")
            if not self._all_known(sample.weight_versions, current):
                raise ValueError(
                    f"--strict-weight-versions: sample {sample.index} of {where} has the weight versions "
                    f"{sample.weight_versions}, of which the trainer has not published all; its current one is "
                    f"{current!r}"
                )

    def _all_known(self, labels: list[str] | tuple[int | str, ...], current: VersionLabel | None) -> bool:
        return current is not None and all(self._versions.age(label, current) is not None for label in labels)
