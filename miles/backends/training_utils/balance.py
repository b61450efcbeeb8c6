"""Splitting a list of lengths into parts of nearly equal sum: the Karmarkar-Karp largest differencing method.

Karmarkar, Karp: The Differencing Method of Set Partitioning (1982). Standard library only.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class _Part:
    """Indices of one part and the sum of their lengths."""

    total: int
    indices: tuple[int, ...]

    def __add__(self, other: _Part) -> _Part:
        return _Part(self.total + other.total, self.indices + other.indices)

    @property
    def fullness(self) -> tuple[int, int]:
        """Sort key; counting the indices as well keeps empty parts last, so that none stays empty."""
        return (self.total, len(self.indices))


def balanced_partition(lengths: Sequence[int], num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Split `range(len(lengths))` into `num_parts` parts whose sums of lengths are close.

    No part is empty, and the largest and the smallest sum differ by at most `max(lengths)`. With `equal_size` every
    part also has the same number of indices, and the sums differ by at most `max(lengths) - min(lengths)`. Indices
    are ascending within a part, and parts are ordered by their first index, so the result is deterministic.

    >>> balanced_partition([8, 7, 6, 5, 4], 2)
    [[0, 2], [1, 3, 4]]

    Raises ValueError for fewer lengths than parts, or with `equal_size` for a count that `num_parts` does not divide.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    if len(lengths) < num_parts:
        raise ValueError(f"cannot split {len(lengths)} samples into {num_parts} parts without an empty one")
    if equal_size and len(lengths) % num_parts:
        raise ValueError(f"cannot split {len(lengths)} samples into {num_parts} parts of equal size")

    # A state is a list of `num_parts` parts, fullest first. Merging the two states that are least balanced, fullest
    # with emptiest, never increases the larger of their spreads: that is the bound in the docstring.
    states = _single_states(lengths, num_parts, 1 if not equal_size else num_parts)
    heap = [(-_spread(state), order, state) for order, state in enumerate(states)]
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = sorted(
            (a + b for a, b in zip(first, reversed(second), strict=True)), key=lambda part: part.fullness, reverse=True
        )
        heapq.heappush(heap, (-_spread(merged), order, merged))
        order += 1
    return sorted(sorted(part.indices) for part in heap[0][2])


def _single_states(lengths: Sequence[int], num_parts: int, per_state: int) -> list[list[_Part]]:
    """The states to start from: `per_state` indices each, one to a part, longest first."""
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    empty = _Part(0, ())
    return [
        [_Part(lengths[i], (i,)) for i in longest_first[start : start + per_state]] + [empty] * (num_parts - per_state)
        for start in range(0, len(lengths), per_state)
    ]


def _spread(state: list[_Part]) -> int:
    return state[0].total - state[-1].total
