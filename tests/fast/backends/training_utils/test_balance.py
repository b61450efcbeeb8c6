from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.backends.training_utils.balance import balanced_partition

LENGTHS = st.lists(st.integers(min_value=0, max_value=5000), min_size=1, max_size=60)


def test_differencing_of_five_lengths_into_two_parts() -> None:
    # States (fullest | emptiest): 8|0 7|0 6|0 5|0 4|0. The two widest merge crosswise: 8|0 + 0|7 = 8|7, then
    # 6|0 + 0|5 = 6|5, then 4|0 + 7|8 = 11|8 (4 and 7 against 8), last 11|8 + 5|6 = 16|14: {4, 7, 5} against {8, 6}.
    assert balanced_partition([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]


def test_equal_lengths_are_spread_evenly() -> None:
    assert [len(part) for part in balanced_partition([3] * 12, 4)] == [3, 3, 3, 3]


def test_equal_size_keeps_the_number_of_samples() -> None:
    # One long sample and three short ones: by length alone the long one would stand alone.
    assert balanced_partition([100, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert balanced_partition([100, 1, 1, 1], 2, equal_size=True) == [[0, 3], [1, 2]]


@given(LENGTHS, st.integers(min_value=1, max_value=12))
def test_every_index_once_no_part_empty_and_the_bound_holds(lengths: list[int], num_parts: int) -> None:
    num_parts = min(num_parts, len(lengths))
    parts = balanced_partition(lengths, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert len(parts) == num_parts
    assert all(parts)
    sums = [sum(lengths[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(lengths)
    assert parts == balanced_partition(lengths, num_parts)


@given(LENGTHS, st.integers(min_value=1, max_value=6))
def test_equal_size_bound(lengths: list[int], num_parts: int) -> None:
    lengths = lengths * num_parts
    parts = balanced_partition(lengths, num_parts, equal_size=True)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert {len(part) for part in parts} == {len(lengths) // num_parts}
    sums = [sum(lengths[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(lengths) - min(lengths)


@pytest.mark.parametrize(
    ("lengths", "num_parts", "equal_size", "message"),
    [
        ([1], 2, False, "without an empty one"),
        ([1, 2, 3], 2, True, "equal size"),
        ([1], 0, False, "at least 1"),
    ],
)
def test_impossible_splits_are_refused(lengths: list[int], num_parts: int, equal_size: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balanced_partition(lengths, num_parts, equal_size=equal_size)
