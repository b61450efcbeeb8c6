"""Attempts at samples, as the run's trace learns of them."""

from __future__ import annotations

import asyncio

import pytest

from miles.rollout.generate_utils.attempts import AttemptLog, answered_by
from miles.utils.types import Sample


class Failed(Exception):
    pass


async def answered(sample: Sample, *urls: str | None, error: Exception | None = None) -> Sample:
    for url in urls:
        answered_by({"engine_url": url} if url else {})
    if error is not None:
        raise error
    sample.status, sample.response_length = Sample.Status.COMPLETED, 3
    return sample


async def test_an_attempt_is_noted_with_its_engines_and_its_end() -> None:
    times = iter(range(10))
    log = AttemptLog(10, clock=lambda: float(next(times)))
    sample = Sample(index=4, group_index=2)
    assert await log.watch(sample, False, answered(sample, "http://a", None, "http://a", "http://b")) is sample
    with pytest.raises(Failed):
        await log.watch(sample, True, answered(sample, error=Failed()))
    first, second = log.take()
    assert first == (4, 2, 0.0, 1.0, "completed", 3, ("http://a", "http://b"), False)
    assert second[2:] == (2.0, 3.0, "Failed", 3, (), True)
    assert log.take() == []


async def test_attempts_side_by_side_have_engines_of_their_own() -> None:
    log = AttemptLog(10)
    samples = [Sample(index=i) for i in range(3)]
    await asyncio.gather(*(log.watch(s, False, answered(s, f"http://{s.index}")) for s in samples))
    assert {span.sample_index: span.engines for span in log.take()} == {i: (f"http://{i}",) for i in range(3)}


async def test_past_its_limit_the_log_keeps_nothing() -> None:
    log = AttemptLog(1)
    for _ in range(3):
        await log.watch(Sample(), False, answered(Sample()))
    assert len(log.take()) == 1


def test_outside_of_an_attempt_nobody_asks_who_has_answered() -> None:
    answered_by({"engine_url": "http://a"})
