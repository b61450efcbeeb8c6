"""Waiting for whichever ends first."""

from __future__ import annotations

import asyncio

import pytest

from miles.ray.waits import first_of
from tests.fast.virtual_time import virtual


async def after(secs: float, result: str) -> str:
    await asyncio.sleep(secs)
    return result


@virtual
async def test_the_first_result_counts_and_nothing_is_left_waiting() -> None:
    assert await first_of([after(9, "late"), after(1, "soon")]) == "soon"
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_of_several_that_end_together_the_one_named_first_counts() -> None:
    for _ in range(20):  # a set of tasks has no order
        assert await first_of([after(1, "a"), after(1, "b"), after(1, "c")]) == "a"


@virtual
async def test_none_in_time_and_an_error_that_comes_first() -> None:
    assert await first_of([after(9, "late")], timeout_secs=1) is None

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await first_of([after(9, "late"), fail()])
