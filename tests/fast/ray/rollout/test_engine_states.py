"""When an engine is started again, and when the run cannot go on."""

from __future__ import annotations

from miles.ray.rollout.engine_states import PAUSES_SECS, EngineState, EngineStates, Verdict


def fleet(count: int = 2, *, restarts_engines: bool = True) -> EngineStates:
    states = EngineStates(count, restarts_engines=restarts_engines)
    for i in range(count):
        states.serving(states.started(i, f"http://engine-{i}"))
    return states


def test_an_engine_waits_for_weights_before_it_serves() -> None:
    states = EngineStates(1, restarts_engines=True)
    assert states.in_state(EngineState.STARTING) and not states.up
    ref = states.started(0, "http://a")
    assert states.in_state(EngineState.WAITING) == (ref,) == states.up
    states.serving(ref)
    assert states.in_state(EngineState.SERVING) == (ref,)


def test_without_fault_tolerance_the_first_death_ends_the_run_with_its_own_message() -> None:
    assert fleet(restarts_engines=False).died(0, "engine-0", "engine-0 was killed") == Verdict(
        fatal="engine-0 was killed"
    )


def test_the_loss_of_the_last_engine_ends_the_run() -> None:
    states = fleet()
    assert states.died(0, "engine-0", "hangs").fatal is None
    assert states.died(1, "engine-1", "engine-1 died").fatal == "the last engine of 2 is lost: engine-1 died"
    assert fleet(1).died(0, "engine-0", "gone").fatal == "the last engine is lost: gone"


def test_an_engine_that_waits_for_weights_is_not_lost() -> None:
    states = fleet()
    states.died(0, "engine-0", "hangs")
    states.starting(0)
    back = states.started(0, "http://new")
    assert states.died(1, "engine-1", "gone").fatal is None
    assert states.up == (back,)


def test_an_engine_may_fail_only_so_often_without_serving_and_waits_longer_each_time() -> None:
    states = fleet()
    pauses = []
    for _ in range(3):
        pauses.append(states.died(0, "engine-0", "no GPU").pause_secs)
        states.starting(0)
    assert pauses == [0.0, 5.0, 15.0]
    states.started(0, "http://up but without weights")
    verdict = states.died(0, "engine-0", "no GPU\n    | log")
    assert verdict.fatal == "engine-0 has died 3 times in a row before it served: no GPU\n    | log"


def test_an_engine_that_has_served_may_fail_as_often_again() -> None:
    states = fleet()
    for _ in range(10):
        assert states.died(0, "engine-0", "killed") == Verdict(pause_secs=PAUSES_SECS[0])
        states.starting(0)
        states.serving(states.started(0, "http://a"))
    assert states.restarts == 10


def test_a_life_that_is_over_neither_serves_nor_counts_as_up_though_the_address_is_the_same() -> None:
    states = fleet()
    (old, _) = states.up
    states.died(0, "engine-0", "killed")
    states.starting(0)
    new = states.started(0, old.url)
    assert not states.is_up(old) and states.is_up(new)
    states.serving(old)
    assert states.in_state(EngineState.WAITING) == (new,)
