"""How stale a group is, against the version that the trainer has told or the engines report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.rollout._fully_async_groups import describe, samples_of

if TYPE_CHECKING:
    from miles.rollout._fully_async_ledger import GroupKey
    from miles.rollout._fully_async_versions import VersionLabel, WeightVersions


def staleness_of(
    key: GroupKey, oldest_number: int | None, versions: WeightVersions, current: VersionLabel | None
) -> int | None:
    """Versions from the oldest one that wrote a token of the group to `current`; None where that cannot be told.

    A group that is newer than `current` is fresh (0): the weights moved on after that was taken. `oldest_number`: the
    group's oldest numeric version.
    """
    if current is None:
        return None
    numeric = None if oldest_number is None else versions.age(oldest_number, current)
    if numeric is not None and len(key.versions) == 1:
        return numeric
    other = versions.oldest_age(key.versions, current)
    return numeric if other is None else max(other, numeric or 0)


def unknown_samples(key: GroupKey, versions: WeightVersions, current: VersionLabel | None) -> int:
    """Samples that carry no version, or one whose age cannot be told."""
    if not key.unversioned and current is not None and all(versions.age(v, current) is not None for v in key.versions):
        return 0
    assert key.group is not None
    return sum(_is_unknown(sample.weight_versions, versions, current) for sample in samples_of(key.group))


def require_known(key: GroupKey, versions: WeightVersions, current: VersionLabel | None) -> None:
    """Raise ValueError naming the first sample whose age cannot be told."""
    assert key.group is not None
    where = describe(key.prompt_group)
    if current is None:
        raise ValueError(f"--strict-weight-versions: the current weight version is not known, to judge {where}")
    for sample in samples_of(key.group):
        if not sample.weight_versions:
            raise ValueError(f"--strict-weight-versions: sample {sample.index} of {where} carries no weight version")
        for label in sample.weight_versions:
            if versions.age(label, current) is None:
                raise ValueError(
                    f"--strict-weight-versions: sample {sample.index} of {where} has the weight version {label!r}, "
                    f"which the trainer has not published; the current one is {current!r}"
                )


def _is_unknown(labels: list[str], versions: WeightVersions, current: VersionLabel | None) -> bool:
    return not labels or any(versions.age(label, current) is None for label in labels)
