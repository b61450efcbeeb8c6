"""The contract of the sample filter: `fn(args, groups) -> None`, which marks samples of a batch in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.utils.types import Sample
from miles.utils.user_calls import UserCode, call_user, name_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

_FLAG = "--rollout-sample-filter-path"
_CONTRACT = "it must mark samples (sample.remove_sample = True) and leave the lists as they are"


async def apply_sample_filter(
    fn: Callable[..., Any], args: Namespace, batch: list[list[Any]], *, keeps_shape: bool = True
) -> None:
    """Let `fn` mark the samples of `batch`. What it raises comes with a note that names it.

    Raises ValueError where it returns something, which would be forgotten, or puts something else in a sample's place;
    with `keeps_shape` also where a group, or a member of one, is missing.
    """
    shape = [len(group) for group in batch]
    with UserCode("sample filter", fn, f"a batch of {len(batch)} groups"):
        result = await call_user(fn, args, batch)
    if result is not None and result is not batch:
        raise ValueError(
            f"{_FLAG}: {name_of(fn)} returned a {type(result).__name__}, and what it returns is not used; {_CONTRACT}"
        )
    if keeps_shape and [len(group) for group in batch] != shape:
        raise ValueError(
            f"{_FLAG}: {name_of(fn)}: the filter changed the batch from {len(shape)} groups to {len(batch)}, or the "
            f"number of samples in a group; {_CONTRACT}"
        )
    for group in batch:
        _require_samples(group, fn, group)


def _require_samples(members: Any, fn: Callable[..., Any], group: Any) -> None:
    for member in members if isinstance(members, list | tuple) else [members]:
        if isinstance(member, list | tuple):
            _require_samples(member, fn, group)
        elif member is None or isinstance(member, str | int | float):
            known = next((m.group_index for m in group if isinstance(m, Sample)), None)
            raise ValueError(f"{_FLAG}: {name_of(fn)} has put {member!r} in the place of a sample of group {known}")
