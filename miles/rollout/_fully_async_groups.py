"""Reading a finished prompt group: pure functions, no state.

Notation: a prompt group is flat, `list[Sample]` of `n_samples_per_prompt`, as the data source handed it out. The group
that generation made of it has as many members; a member is a Sample, or a list of Samples where one trajectory became
several training sequences (agents, compaction).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PromptGroup = list[Sample]
Group = list[Sample | list[Sample]]
FinishedGroup = tuple[PromptGroup, Group]


def _iter_samples(group: Sequence[object]) -> Iterator[Sample]:
    """Every sample of the group in order, at any nesting."""
    for member in group:
        if isinstance(member, list | tuple):
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
    versions = [v for sample in _iter_samples(group) if (v := sample.oldest_weight_version) is not None]
    return min(versions, default=None)


def has_aborted(group: Sequence[object]) -> bool:
    """Whether any sample of the group, at any nesting, was aborted."""
    return any(sample.status == Sample.Status.ABORTED for sample in _iter_samples(group))


def describe(prompt_group: PromptGroup) -> str:
    """The prompt group's name in messages and task names: `group 3 (samples 24..31)`."""
    if not prompt_group:
        return "group without samples"
    first, last = prompt_group[0], prompt_group[-1]
    return f"group {first.group_index} (samples {first.index}..{last.index})"


def require_members(finished: FinishedGroup, expected: int) -> None:
    """Raise ValueError naming the group where it does not have `expected` members."""
    prompt_group, group = finished
    if len(group) != expected:
        raise ValueError(
            f"{describe(prompt_group)} has {len(group)} members, --n-samples-per-prompt is {expected}: a generate "
            "function or the data source returned another number"
        )


def sorted_batch(finished: Iterable[FinishedGroup]) -> list[list[Any]]:
    """The groups by the index of their first sample; those without an index come last, as they arrived."""
    return sorted((group for _, group in finished), key=_sort_key)


def _sort_key(group: Group) -> tuple[bool, int]:
    index = _first_sample(group).index
    return (index is None, index or 0)
