"""Reading a finished prompt group: pure functions, no state.

Notation: a prompt group is flat, `list[Sample]` of `n_samples_per_prompt`, as the data source handed it out. The group
that generation made of it has as many members; a member is a Sample, or a list of Samples where one trajectory became
several training sequences (agents, compaction).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.rollout._fully_async_versions import version_number
from miles.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miles.rollout._fully_async_ledger import GroupKey

PromptGroup = list[Sample]
Group = list[Sample | list[Sample]]

_NESTED = (list, tuple)
_BYTES_PER_SAMPLE = 2048  # the object, its dictionary and its small fields
_BYTES_PER_PROMPT_TOKEN = 48  # an int object, the pointer to it, and its text
_BYTES_PER_RESPONSE_TOKEN = 80  # the same, and a float object with its pointer
_COMPLETED = Sample.Status.COMPLETED
_NO_ANSWER = (Sample.Status.ABORTED, Sample.Status.FAILED)


def _iter_samples(group: Sequence[object]) -> Iterator[Sample]:
    """Every sample of the group in order, at any nesting."""
    for member in group:
        if isinstance(member, _NESTED):
            yield from _iter_samples(member)
        else:
            yield member  # type: ignore[misc]


def _first_sample(group: Sequence[object]) -> Sample:
    """The group's first sample, which stands for it in sorting and in messages. Raises ValueError if it has none."""
    sample = next(_iter_samples(group), None)
    if sample is None:
        raise ValueError("a generate function returned a group without any sample")
    return sample


def group_oldest_weight_version(group: Sequence[object]) -> int | None:
    """The oldest weight version that wrote a token of the group; None where no sample carries a numeric version."""
    labels: set[int | str] = set()
    for sample in samples_of(group):
        labels.update(sample.weight_versions)
    return min((n for label in labels if (n := version_number(label)) is not None), default=None)


def samples_of(group: Sequence[Any]) -> Sequence[Sample]:
    """Every sample of the group in order, at any nesting: the group itself where it is flat."""
    for member in group:
        if member.__class__ is not Sample and isinstance(member, _NESTED):
            return list(_iter_samples(group))
    return group


def take_stock(key: GroupKey, group: Group) -> None:
    """Note in the books what generation made of the group: one quick pass over its samples.

    `size_bytes` is an estimate. Siblings share their prompt, so the first sample tells its length; each response token
    costs its id, its log-probability and its text; arrays (routed experts) count as many times as there are samples.
    """
    try:
        _tally(key, group)
    except AttributeError:  # a member that is a list
        samples = samples_of(group)
        _require_samples(key.prompt_group, samples)
        _tally(key, samples)
    key.group = group


def _tally(key: GroupKey, samples: Sequence[Any]) -> None:
    key.samples = number = len(samples)
    if not number:
        return
    first = samples[0]
    labels = first.weight_versions
    aborted = mixed = False
    tokens = 0
    for sample in samples:
        tokens += sample.response_length
        if sample.status is not _COMPLETED and _has_no_answer(sample):
            aborted = True
        if sample.weight_versions != labels:  # siblings mostly have the same
            mixed = True
    key.tokens = tokens
    key.aborted = aborted
    if mixed:
        key.versions = tuple({label for sample in samples for label in sample.weight_versions})
        key.unversioned = sum(not sample.weight_versions for sample in samples)
    else:
        key.versions = tuple(labels) if len(labels) < 2 else tuple(set(labels))
        key.unversioned = 0 if labels else number
    each = _BYTES_PER_SAMPLE + _BYTES_PER_PROMPT_TOKEN * max(0, len(first.tokens) - first.response_length)
    if first.rollout_routed_experts is not None:
        each += getattr(first.rollout_routed_experts, "nbytes", 0)
    key.size_bytes = each * number + _BYTES_PER_RESPONSE_TOKEN * tokens


def _has_no_answer(sample: Sample) -> bool:
    """Whether it was aborted or failed. Raises TypeError for a status that is none."""
    if isinstance(sample.status, str):
        raise TypeError(
            f"sample {sample.index} of group {sample.group_index} came back with the text {sample.status!r} as its "
            "status: a generate function must set a Sample.Status"
        )
    return sample.status in _NO_ANSWER


def _require_samples(prompt_group: PromptGroup, samples: Sequence[Any]) -> None:
    for sample in samples:
        if sample is None or isinstance(sample, str | int | float | dict):
            raise TypeError(f"generating {describe(prompt_group)} returned {sample!r} in the place of a sample")


def describe(prompt_group: PromptGroup) -> str:
    """The prompt group's name in messages and task names: `group 3 (samples 24..31)`."""
    if not prompt_group:
        return "group without samples"
    first, last = prompt_group[0], prompt_group[-1]
    return f"group {first.group_index} (samples {first.index}..{last.index})"


def require_members(prompt_group: PromptGroup, group: Group, expected: int) -> None:
    """Raise ValueError naming the group where it does not have `expected` members."""
    if len(group) != expected:
        raise ValueError(
            f"{describe(prompt_group)} has {len(group)} members, --n-samples-per-prompt is {expected}: a generate "
            "function or the data source returned another number"
        )


def sorted_batch(groups: list[Group]) -> list[list[Any]]:
    """The groups by the index of their first sample; those without an index come last, as they arrived."""
    try:
        return sorted(groups, key=lambda group: group[0].index)  # type: ignore[union-attr,arg-type,return-value]
    except (AttributeError, IndexError, TypeError):  # nested, empty, or without an index
        return sorted(groups, key=_sort_key)


def _sort_key(group: Group) -> tuple[bool, int]:
    index = _first_sample(group).index
    return (index is None, index or 0)
