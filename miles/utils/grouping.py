"""Consecutive items put together up to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")


def groups_up_to(limit: int, items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Consecutive items whose sizes add up to `limit` at most, unless one alone has more. Holds one group at a time."""
    group: list[T] = []
    size = 0
    for item in items:
        its_size = size_of(item)
        if group and size + its_size > limit:
            yield group
            group, size = [], 0
        group.append(item)
        size += its_size
    if group:
        yield group
