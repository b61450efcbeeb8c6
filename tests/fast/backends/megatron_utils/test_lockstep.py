"""What rank 0 alone does in a gather of all ranks ends on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from miles.backends.megatron_utils.lockstep import _as_sent, in_lockstep

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_the_gather_is_run_to_its_end_after_a_failure() -> None:
    gathered = []

    def gathering() -> Iterator[int]:
        for i in range(4):
            gathered.append(i)
            yield i

    def refused(items: Iterator[int]) -> None:
        next(items)
        raise ConnectionError("refused")

    with pytest.raises(ConnectionError, match="refused"):
        in_lockstep(gathering(), refused)
    assert gathered == [0, 1, 2, 3]


def test_the_result_is_handed_back_and_what_was_not_taken_is_gathered_still() -> None:
    items = iter(range(5))
    assert in_lockstep(items, next) == 0
    assert list(items) == []
    assert in_lockstep(iter(range(3)), None) is None


def test_a_failure_of_the_gather_itself_is_raised_at_once() -> None:
    def gathering() -> Iterator[int]:
        yield 0
        raise OSError("a rank is gone")

    with pytest.raises(OSError, match="a rank is gone"):
        in_lockstep(gathering(), list)


def test_an_exception_that_cannot_travel_is_told_in_words() -> None:
    class Local(Exception):
        pass

    told = _as_sent(Local("why"))
    assert isinstance(told, RuntimeError) and "Local on trainer rank 0: why" in str(told)
