"""Arithmetic on time intervals: how long something was active, and how long two things were at once.

An interval is (start, end) in seconds of one clock. Sets of intervals are lists in any order that may overlap;
`merged` brings them into order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as disjoint intervals in order; empty and inverted ones vanish.

    >>> merged([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def total(intervals: Iterable[Interval]) -> float:
    """Seconds during which at least one interval is active; a moment counts once however many overlap there."""
    return sum(end - start for start, end in merged(intervals))


def intersection(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in both unions, as disjoint intervals in order. Linear after sorting.

    >>> intersection([(0, 2), (3, 5)], [(1, 4)])
    [(1, 2), (3, 4)]
    """
    ours, theirs = merged(first), merged(second)
    result: list[Interval] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        start = max(ours[i][0], theirs[j][0])
        end = min(ours[i][1], theirs[j][1])
        if start < end:
            result.append((start, end))
        if ours[i][1] <= theirs[j][1]:
            i += 1
        else:
            j += 1
    return result


def difference(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The moments of the first union that do not lie in the second, as disjoint intervals in order.

    >>> difference([(0, 5)], [(1, 2), (4, 6)])
    [(0, 1), (2, 4)]
    """
    result: list[Interval] = []
    holes = merged(second)
    i = 0
    for start, end in merged(first):
        while i < len(holes) and holes[i][1] <= start:
            i += 1
        at, j = start, i
        while j < len(holes) and holes[j][0] < end:
            if at < holes[j][0]:
                result.append((at, holes[j][0]))
            at = max(at, holes[j][1])
            j += 1
        if at < end:
            result.append((at, end))
    return result


def overlap(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Seconds during which both are active."""
    return total(intersection(first, second))
