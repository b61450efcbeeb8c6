"""Who counts as lost, given what each look has found."""

from __future__ import annotations

import pytest

from miles.ray.silence import LONGEST_LOOK_SECS, Silence

LIMIT, LOOK = 60.0, 5.0


def looks(silence: Silence, name: str, answers: str, *, start: float = 0.0) -> float:
    """One look every five seconds, `y` for an answer; returns the time after the last."""
    now = start
    for answer in answers:
        now += LOOK
        silence.learn(name, heard=answer == "y", now=now)
    return now


@pytest.fixture
def silence() -> Silence:
    silence = Silence(LIMIT)
    for name in ("a", "b"):
        silence.begin(name, 0.0)
    return silence


def test_a_process_is_lost_when_it_was_silent_for_the_limit_and_not_before(silence: Silence) -> None:
    now = looks(silence, "a", "y" + 11 * "n")
    assert silence.suspects() == ["a"] and silence.lost() == []
    looks(silence, "a", "n", start=now)
    assert silence.lost() == ["a"]


def test_one_answer_makes_good_for_every_silence_before(silence: Silence) -> None:
    looks(silence, "a", 5 * ("y" + 11 * "n") + "y")
    assert silence.suspects() == []


def test_time_in_which_nobody_listened_counts_for_nobody(silence: Silence) -> None:
    """The driver itself was stopped for an hour, or its machine slept."""
    now = looks(silence, "a", "y")
    silence.learn("a", heard=False, now=now + 3600.0)
    assert silence.lost() == []
    looks(silence, "a", 10 * "n", start=now + 3600.0)
    assert silence.lost() == ["a"]


def test_the_most_silent_comes_first(silence: Silence) -> None:
    looks(silence, "a", "yyy" + 12 * "n")
    looks(silence, "b", "y" + 14 * "n")
    assert silence.lost() == ["b", "a"]


def test_what_was_never_heard_is_out_of_reach_and_not_lost(silence: Silence) -> None:
    looks(silence, "a", 100 * "n")
    assert silence.never_heard("a") and not silence.suspects() and not silence.lost()
    looks(silence, "b", "y" + 100 * "n")
    assert not silence.never_heard("b")


def test_what_is_gone_is_not_silent(silence: Silence) -> None:
    looks(silence, "a", "y" + 20 * "n")
    silence.forget("a")
    assert not silence.suspects() and not silence.lost()


@pytest.mark.parametrize(("limit", "look"), [(6.0, 1.0), (60.0, LONGEST_LOOK_SECS), (600.0, LONGEST_LOOK_SECS)])
def test_several_looks_fit_into_the_limit(limit: float, look: float) -> None:
    assert Silence(limit).look_secs == look
