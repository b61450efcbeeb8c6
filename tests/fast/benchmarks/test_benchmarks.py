"""The benchmarks run, at tiny sizes. No time is asserted."""

from __future__ import annotations

import pytest

from benchmarks import heart, rollout_path


@pytest.mark.parametrize("held", [False, True])
def test_heart_compares_the_floor_with_both_granularities(held: bool) -> None:
    seconds = heart.compare(heart.ready_made(8), 4, count=64, rounds=1, held=held)
    assert set(seconds) == {"floor", *heart.GRANULARITIES}


def test_heart_samples_the_memory() -> None:
    residents = heart.memory_over(heart.ready_made(8), 128, points=2)
    assert len(residents) == 3
    assert all(resident > 0 for resident in residents)


def test_heart_puts_the_generation_back() -> None:
    before = heart.fully_async_rollout.generate_and_rm_group
    heart.compare(heart.ready_made(2), 2, count=64, rounds=1, held=False)
    assert heart.fully_async_rollout.generate_and_rm_group is before


@pytest.mark.parametrize("client", ["miles", "aiohttp"])
def test_rollout_path_answers_every_sample(client: str) -> None:
    numbers = rollout_path.measurement(client, 16, limit_secs=30.0)
    assert numbers is not None
    assert numbers["warm"]
    assert numbers["samples_per_sec"] > 0
