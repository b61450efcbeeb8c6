"""Which side is the bottleneck, and what to change: a table of steps and what is said about them."""

from __future__ import annotations

from typing import Any

import pytest

from miles.utils.bottleneck import CHANGED_FOR, PREFIX, SHOW_EVERY, BottleneckWatch, combined, diagnose


def step(**metrics: float) -> dict[str, float]:
    """A step of 10 s in which 100 groups were pulled and nobody waited, but for `metrics`."""
    perf = {"train_wait_time": 10 * metrics.get("train_idle_fraction", 0.0)}
    perf |= {name.removeprefix("perf_"): metrics.pop(name) for name in list(metrics) if name.startswith("perf_")}
    values: dict[str, Any] = {
        "generation_idle_fraction": 0.0,
        "train_idle_fraction": 0.0,
        "producer_blocked_seconds": 0.0,
        "in_flight_samples": 64,
        "in_flight_bound": 64,
        "groups_pulled": 100,
        **metrics,
    }
    return {
        "perf/step_time": 10.0,
        **{f"perf/{name}": value for name, value in perf.items()},
        **{PREFIX + name: value for name, value in values.items()},
    }


SLOW_GENERATION = {"train_idle_fraction": 0.4}
SLOW_TRAINING = {"generation_idle_fraction": 0.3, "producer_blocked_seconds": 4.0}
IN_QUEUE = {"trained_staleness_in_queue_mean": 1.5, "trained_staleness_in_flight_mean": 0.2}

TABLE = [
    # side, cause, metrics, words of the sentence
    ("generation", "engines", SLOW_GENERATION, ["waited for 40%", "--async-max-concurrent-samples", "add engines"]),
    ("generation", "not full", {**SLOW_GENERATION, "in_flight_samples": 8}, ["less than half", "held back"]),
    ("generation", "standstill", {**SLOW_GENERATION, "event_loop_lag_max_seconds": 2.5}, ["2.5 s", "shows none"]),
    ("generation", "aborted", {**SLOW_GENERATION, "groups_recycled_aborted": 20}, ["20%", "aborted"]),
    ("generation", "filtered", {**SLOW_GENERATION, "groups_dropped_filtered": 60}, ["60%", "filter"]),
    ("generation", "engines", {**SLOW_GENERATION, "groups_dropped_filtered": 40}, ["add engines"]),
    ("generation", "pause", {**SLOW_GENERATION, "weight_update_pause_seconds": 2.0}, ["--update-weights-interval"]),
    (
        "generation",
        "stale",
        {**SLOW_GENERATION, **IN_QUEUE, "groups_recycled_stale": 10, "groups_dropped_stale": 5},
        ["15%", "too old", "lower --async-data-buffer-capacity-factor"],
    ),
    ("training", "queue full", SLOW_TRAINING, ["stood still for 40%", "add trainers"]),
    ("training", "held back", {"generation_idle_fraction": 0.3}, ["stood still for 30%", "--max-weight-staleness"]),
    (
        "training",
        "stale",
        {**SLOW_TRAINING, "groups_recycled_stale": 30},
        ["30%", "lower --async-max-concurrent-samples"],
    ),
    ("both", "bursts", {**SLOW_GENERATION, **SLOW_TRAINING}, ["bursts", "raise --async-data-buffer-capacity-factor"]),
    (
        "both",
        "alternating",
        {**SLOW_GENERATION, "generation_idle_fraction": 0.5},
        ["trainer for 40%", "generation for 50%", "raise --max-weight-staleness"],
    ),
    (
        "neither",
        "end of data",
        {"generation_idle_fraction": 0.9, "data_ended": 1, "in_flight_samples": 0},
        ["The data is ending", "generation stood still for 90%", "nothing to change"],
    ),
    (
        "neither",
        "end of data",
        {**SLOW_GENERATION, "generation_idle_fraction": 0.5, "data_ended": 1, "in_flight_samples": 2},
        ["trainer waited for 40%", "50%"],
    ),
    ("training", "queue full", {**SLOW_TRAINING, "data_ended": 1}, ["add trainers"]),
    ("training", "held back", {"generation_idle_fraction": 0.3, "data_ended": 0.1}, ["--max-weight-staleness"]),
    ("weight updates", "pause", {"weight_update_pause_seconds": 3.0}, ["30%", "--pause-generation-mode in_place"]),
    ("neither", "stale", {**IN_QUEUE, "groups_recycled_stale": 12}, ["12%", "too old"]),
    ("training", "queue grows", {"queue_size": 40, "groups_trained": 32}, ["40 finished groups", "add trainers"]),
    ("neither", "balanced", {"queue_size": 20, "groups_trained": 32}, ["nothing to change"]),
    ("evaluation", "evaluation", {"perf_eval_time": 3.0, "train_idle_fraction": 0.2}, ["30%", "evaluate less often"]),
    ("generation", "engines", {"perf_eval_time": 2.0, "train_idle_fraction": 0.4}, ["add engines"]),
    ("neither", "overhead", {"train_idle_fraction": 0.25, "perf_train_wait_time": 0.2}, ["25%", "larger batches"]),
    ("neither", "balanced", {"train_idle_fraction": 0.05}, ["idle for 5%", "nothing to change"]),
]


@pytest.mark.parametrize(("side", "cause", "metrics", "words"), TABLE, ids=[f"{s}: {c}" for s, c, *_ in TABLE])
def test_the_table(side: str, cause: str, metrics: dict[str, float], words: list[str]) -> None:
    diagnosis = diagnose(step(**metrics))
    assert diagnosis is not None
    assert (diagnosis.side, diagnosis.cause) == (side, cause)
    assert all(word in diagnosis.sentence for word in words), diagnosis.sentence
    assert diagnosis.sentence.endswith(".") and diagnosis.sentence.count(". ") == 0, "one sentence"
    assert len(diagnosis.sentence) < 260


def test_a_step_that_is_not_fully_asynchronous_has_no_sentence() -> None:
    assert diagnose({"perf/step_time": 1.0, "perf/wait_time_ratio": 0.9}) is None
    assert BottleneckWatch().step(0, {"perf/step_time": 1.0}) is None
    assert combined([{"perf/step_time": 1.0}]) == {}


def test_missing_metrics_and_an_empty_step_say_nothing_wrong() -> None:
    diagnosis = diagnose({PREFIX + "generation_idle_fraction": 0.0})
    assert diagnosis is not None and diagnosis.cause == "balanced"


def test_shown_at_once_then_every_few_steps() -> None:
    watch = BottleneckWatch()
    shown = [watch.step(i, step(**SLOW_GENERATION)) is not None for i in range(2 * SHOW_EVERY + 1)]
    assert [i for i, said in enumerate(shown) if said] == [0, SHOW_EVERY, 2 * SHOW_EVERY]


def test_a_change_is_shown_when_it_has_lasted_and_a_flicker_is_not() -> None:
    watch = BottleneckWatch()
    watch.step(0, step(**SLOW_GENERATION))
    assert watch.step(1, step(**SLOW_TRAINING)) is None
    assert watch.step(2, step(**SLOW_GENERATION)) is None
    said = [watch.step(3 + i, step(**SLOW_TRAINING)) for i in range(CHANGED_FOR)]
    assert said[:-1] == [None] * (CHANGED_FOR - 1)
    assert (said[-1] or "").startswith(f"last {CHANGED_FOR} steps: Training is the bottleneck")


def test_what_steps_that_alternate_say_together_is_shown_and_does_not_alternate() -> None:
    """The trainer waits for 8 % and for 16 %, generation for 40 %: 'training' and 'both' by themselves."""
    watch, shown = BottleneckWatch(), []
    for index in range(6 * SHOW_EVERY):
        waits = 0.08 if index % 7 < 4 else 0.16  # in runs of four and three
        shown.append(watch.step(index, step(**SLOW_TRAINING, train_idle_fraction=waits)))
    later = [sentence for sentence in shown[1:] if sentence]
    assert len(later) == 5
    together = f"last {SHOW_EVERY} steps: Both sides wait for each other, the trainer for 1"
    assert all(sentence.startswith(together) for sentence in later)


def test_advice_about_the_queue_does_not_turn_where_a_wait_stays_close_to_its_limit() -> None:
    """Ten steps in which the trainer waits for 12 %, ten with 8 %, and so on: 'both' throughout, with true numbers."""
    watch, shown = BottleneckWatch(), []
    for index in range(6 * SHOW_EVERY):
        waits = 0.12 if index // SHOW_EVERY % 2 == 0 else 0.08
        shown.append(watch.step(index, step(**SLOW_TRAINING, train_idle_fraction=waits)))
    later = [sentence for sentence in shown if sentence]
    assert all("raise --async-data-buffer-capacity-factor" in sentence for sentence in later), later
    assert ["the trainer for 8%" in sentence for sentence in later] == [False, False, True, False, True, False]


def test_a_wait_that_has_become_small_is_no_longer_spoken_of() -> None:
    before = diagnose(step(**SLOW_TRAINING, train_idle_fraction=0.12))
    found = [diagnose(step(**SLOW_TRAINING, train_idle_fraction=waits), before) for waits in (0.06, 0.04)]
    assert [diagnosis and diagnosis.cause for diagnosis in found] == ["bursts", "queue full"]
    held_back = diagnose(step(generation_idle_fraction=0.12))
    found = [diagnose(step(generation_idle_fraction=waits), held_back) for waits in (0.06, 0.04)]
    assert [diagnosis and diagnosis.cause for diagnosis in found] == ["held back", "balanced"]


def test_what_is_said_of_a_full_queue_is_the_time_before_it() -> None:
    diagnosis = diagnose(step(generation_idle_fraction=0.6, producer_blocked_seconds=2.0))
    assert diagnosis is not None and "stood still for 20% of the time before a full queue" in diagnosis.sentence


def test_every_steps_sentence_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    watch = BottleneckWatch()
    for i in range(3):
        watch.step(i, step(**SLOW_GENERATION))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 1", "step 2", "step 3"]


def test_steps_combine_by_the_nature_of_each_metric() -> None:
    """30 s with 10 % and 10 s with 50 % idle: (30 * 0.1 + 10 * 0.5) / 40 = 20 %."""
    slow = step(generation_idle_fraction=0.1, producer_blocked_seconds=1.0, event_loop_lag_max_seconds=0.5)
    fast = step(generation_idle_fraction=0.5, producer_blocked_seconds=2.0, in_flight_samples=32, queue_peak=7)
    total = combined([{**slow, "perf/step_time": 30.0}, fast, {"perf/step_time": 99.0}])
    assert total["perf/step_time"] == 40
    assert total[PREFIX + "generation_idle_fraction"] == pytest.approx(0.2)
    assert total[PREFIX + "producer_blocked_seconds"] == 3
    assert total[PREFIX + "groups_pulled"] == 200
    assert total[PREFIX + "in_flight_samples"] == 48
    assert total[PREFIX + "event_loop_lag_max_seconds"] == 0.5
    assert total[PREFIX + "queue_peak"] == 7
    assert total["steps"] == 2


def test_the_queue_is_compared_with_one_steps_batch_also_over_many_steps() -> None:
    steps = [step(queue_size=40, groups_trained=32)] * 5
    diagnosis = diagnose(combined(steps))
    assert diagnosis is not None and diagnosis.cause == "queue grows"
