"""Interval arithmetic, by hand and against a count of unit cells."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.utils import intervals

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


def cells(items: list[tuple[int, int]]) -> set[int]:
    return {cell for start, end in items for cell in range(start, end)}


def test_merging_joins_what_touches_and_forgets_what_is_empty() -> None:
    assert intervals.merged([(5, 6), (0, 2), (2, 3), (4, 4), (9, 8)]) == [(0, 3), (5, 6)]


def test_a_moment_counts_once_however_many_intervals_cover_it() -> None:
    assert intervals.total([(0, 10), (2, 3), (5, 12)]) == 12


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([], [(0, 1)], []),
        ([(0, 1)], [], [(0, 1)]),
        ([(0, 10)], [(2, 3), (5, 20)], [(0, 2), (3, 5)]),
        ([(0, 4), (6, 10)], [(3, 7)], [(0, 3), (7, 10)]),
        ([(2, 4), (1, 3)], [(0, 9)], []),
        ([(0, 3), (4, 8), (9, 12)], [(1, 10)], [(0, 1), (10, 12)]),
    ],
)
def test_difference(first: list[Any], second: list[Any], expected: list[Any]) -> None:
    assert intervals.difference(first, second) == expected


@given(spans, spans)
def test_difference_against_cells(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    left = intervals.difference(first, second)
    assert cells(left) == cells(first) - cells(second)
    assert left == intervals.merged(left)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([], [(0, 1)], 0),
        ([(0, 1)], [(1, 2)], 0),
        ([(0, 4), (6, 10)], [(3, 7)], 2),
        ([(0, 10)], [(1, 2), (3, 4), (9, 12)], 3),
        ([(0.5, 1.5), (1.0, 2.0)], [(0.0, 1.25)], 0.75),
    ],
)
def test_overlap(first: list[tuple[float, float]], second: list[tuple[float, float]], expected: float) -> None:
    assert intervals.overlap(first, second) == pytest.approx(expected)
    assert intervals.overlap(second, first) == pytest.approx(expected)


@given(spans, spans)
def test_everything_agrees_with_counting_cells(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    assert cells(intervals.merged(first)) == cells(first)
    assert intervals.total(first) == len(cells(first))
    common = intervals.intersection(first, second)
    assert cells(common) == cells(first) & cells(second)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(common))
