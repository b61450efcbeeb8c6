"""A call to all ranks: what they return, and which rank a collective's timeout is about."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from miles.ray.train_group import of_all_ranks
from tests.fast.virtual_time import virtual

GLOO = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation"


async def rank(*, returns: Any = None, fails: Exception | None = None, after: float = 0.0, hangs: bool = False) -> Any:
    await asyncio.sleep(after)
    if hangs:
        await asyncio.get_running_loop().create_future()
    if fails is not None:
        raise fails
    return returns


def notes(error: BaseException) -> str:
    return "; ".join(getattr(error, "__notes__", []))


async def test_what_the_ranks_return_comes_in_their_order() -> None:
    assert await of_all_ranks([rank(returns="a", after=0.01), rank(returns="b")]) == ["a", "b"]


@virtual
async def test_a_collectives_timeout_names_the_rank_that_did_not_give_up() -> None:
    with pytest.raises(RuntimeError, match="Timed out") as caught:
        await of_all_ranks(
            [rank(fails=RuntimeError(GLOO)), rank(hangs=True), rank(fails=RuntimeError(GLOO), after=3.0)]
        )
    assert "trainer-1 has not failed" in notes(caught.value)
    assert "trainer-0" not in notes(caught.value) and "trainer-2" not in notes(caught.value)


@virtual
async def test_it_does_so_through_what_ray_wraps_around_the_error() -> None:
    cause = RuntimeError(GLOO)
    with pytest.raises(RayTaskError):
        await of_all_ranks([rank(fails=RayTaskError("train", "traceback", cause)), rank(hangs=True)])
    assert "trainer-1 has not failed" in notes(cause)


@virtual
async def test_another_failure_is_raised_at_once_and_blames_nobody_who_waits() -> None:
    with pytest.raises(ValueError, match="reward is NaN") as caught:
        await of_all_ranks([rank(hangs=True), rank(fails=ValueError("reward is NaN"))])
    assert not notes(caught.value)
    assert asyncio.get_running_loop().time() < 1.0
