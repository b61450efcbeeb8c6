"""Which side of a fully asynchronous step is the bottleneck, and what to change: one sentence, from its metrics.

                      trainer waits for a batch          trainer does not wait
    generation waits  both: they wait for each other     training
    it does not       generation                         training, where finished groups pile up; weight updates,
                                                         where they take long; else neither
    the data has ended, and what waits waits for that: neither

Pure: the same metrics after the same diagnosis give the same sentence. A share counts from `NOTICEABLE` on; a wait that
the diagnosis before spoke of does until it is under `STILL_NOTICEABLE`, lest the advice turn with every few percent.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

logger = logging.getLogger(__name__)

PREFIX = "rollout/fully_async/"
NOTICEABLE = 0.10
"""Share of a step, or of the groups, from which on something is worth a remark."""

STILL_NOTICEABLE = 0.05
"""Share of a step from which on a wait is worth its remark where the one before was about it, too."""

MOSTLY_FILTERED = 0.50
"""Share of groups that a dynamic filter drops from which on it is."""

MUCH_OVERHEAD = 0.20
"""Share of a step in which the trainer is idle, though neither a batch nor an evaluation keeps it."""

LONG_STANDSTILL_SECS = 1.0
SHOW_EVERY = 10
"""Steps after which the console shows the sentence again, changed or not."""

CHANGED_FOR = 5
"""Steps in a row that must agree on something new before the console shows it out of turn."""


@dataclass(frozen=True)
class Diagnosis:
    """`side`: generation, training, both, evaluation, weight updates or neither. `cause`: which rule has spoken."""

    side: str
    cause: str
    sentence: str


class Shares:
    """A step's metrics as shares of its time and of its groups, 0 where a metric is missing, and which of the waits
    count after what was said `before`."""

    def __init__(self, metrics: Mapping[str, float], before: Diagnosis | None = None) -> None:
        def of(name: str) -> float:
            return metrics.get(PREFIX + name) or 0.0

        seconds = metrics.get("perf/step_time") or 0.0
        pulled = of("groups_pulled")

        def of_time(name: str) -> float:
            return min(1.0, of(name) / seconds) if seconds else 0.0

        def of_groups(*names: str) -> float:
            return min(1.0, sum(map(of, names)) / pulled) if pulled else 0.0

        self.train_idle = of("train_idle_fraction")
        waited = metrics.get("perf/train_wait_time")
        self.trainer_waits = self.train_idle if waited is None or not seconds else min(1.0, waited / seconds)
        self.evaluation = min(1.0, (metrics.get("perf/eval_time") or 0.0) / seconds) if seconds else 0.0
        self.generation_idle = of("generation_idle_fraction")
        self.blocked = of_time("producer_blocked_seconds")
        self.pause = of_time("weight_update_pause_seconds")
        self.stale = of_groups("groups_recycled_stale", "groups_dropped_stale")
        self.aborted = of_groups("groups_recycled_aborted", "groups_dropped_aborted")
        self.filtered = of_groups("groups_dropped_filtered")
        trained = of("groups_trained") / metrics.get("steps", 1)
        self.queue_size = of("queue_size")
        self.piles_up = bool(trained) and self.queue_size >= trained
        self.standstill = of("event_loop_lag_max_seconds")
        self.data_ended = of("data_ended") >= 0.5  # in most of the steps
        self.full = not of("in_flight_bound") or of("in_flight_samples") >= 0.5 * of("in_flight_bound")
        self.older_in_queue = of("trained_staleness_in_queue_mean") > of("trained_staleness_in_flight_mean")
        self.generation_waits = max(self.generation_idle, self.blocked)

        def limit(spoken_of: bool) -> float:
            return STILL_NOTICEABLE if spoken_of else NOTICEABLE

        side, cause = (before.side, before.cause) if before is not None else ("", "")
        self.trainer_held_up = self.trainer_waits >= limit(side in ("generation", "both"))
        self.queue_blocks = self.blocked >= limit(cause in ("queue full", "bursts"))
        idles = self.generation_waits >= limit(cause in ("held back", "alternating"))
        self.generation_held_up = self.queue_blocks or idles


def diagnose(metrics: Mapping[str, float], before: Diagnosis | None = None) -> Diagnosis | None:
    """None for a step that is not fully asynchronous. `before`: what was said last, where this follows it."""
    if PREFIX + "generation_idle_fraction" not in metrics:
        return None
    shares = Shares(metrics, before)
    trainer_waits, generation_waits = shares.trainer_held_up, shares.generation_held_up
    if shares.evaluation >= NOTICEABLE and shares.evaluation > shares.trainer_waits:
        return _evaluation(shares)
    if shares.data_ended and (trainer_waits or generation_waits) and not shares.queue_blocks and not shares.full:
        return _end_of_data(shares)
    if trainer_waits and generation_waits:
        return _both(shares)
    if trainer_waits:
        return _generation(shares)
    if generation_waits or shares.piles_up:
        return _training(shares)
    return _neither(shares)


def _evaluation(s: Shares) -> Diagnosis:
    return Diagnosis(
        "evaluation",
        "evaluation",
        f"Evaluation is the bottleneck, it took {s.evaluation:.0%} of the time: evaluate less often, on fewer prompts, "
        "or on engines of its own.",
    )


def _end_of_data(s: Shares) -> Diagnosis:
    return Diagnosis(
        "neither",
        "end of data",
        f"The data is ending, so that the trainer waited for {s.trainer_waits:.0%} and generation stood still for "
        f"{s.generation_idle:.0%} of the time: nothing to change.",
    )


def _generation(s: Shares) -> Diagnosis:
    cause, change = _why_generation_is_slow(s)
    return Diagnosis(
        "generation",
        cause,
        f"Generation is the bottleneck, the trainer waited for {s.trainer_waits:.0%} of the time: {change}.",
    )


def _why_generation_is_slow(s: Shares) -> tuple[str, str]:
    if s.standstill >= LONG_STANDSTILL_SECS:
        return "standstill", (
            f"the rollout's event loop stood still for {s.standstill:.1f} s: by the function that rollout_manager.log "
            "shows, or, where it shows none, since the machine is too busy"
        )
    if s.aborted >= NOTICEABLE:
        return "aborted", (
            f"{s.aborted:.0%} of the groups were aborted and generated again; look into the engines' logs, and at "
            "--sample-timeout-secs"
        )
    if s.stale >= NOTICEABLE:
        return "stale", f"{s.stale:.0%} of the groups were thrown away as too old; {_fresher(s)}"
    if s.filtered >= MOSTLY_FILTERED:
        return "filtered", (
            f"the dynamic filter dropped {s.filtered:.0%} of the groups; use prompts that fit the model, or a milder "
            "filter"
        )
    if s.pause >= NOTICEABLE:
        return "pause", f"the engines were paused for {s.pause:.0%} of the time; {_FEWER_UPDATES}"
    if not s.full:
        return "not full", (
            "less than half of the samples that may be in flight were; look for a submission that is held back by "
            "--max-weight-staleness or by an evaluation"
        )
    return "engines", (
        "raise --async-max-concurrent-samples until the engines are busy, then add engines, or shorten the answers"
    )


def _training(s: Shares) -> Diagnosis:
    begin = f"Training is the bottleneck, generation stood still for {s.generation_waits:.0%} of the time"
    if not s.generation_held_up:
        begin = f"Training is the bottleneck, {s.queue_size:.0f} finished groups are left after the drain"
    if s.stale >= NOTICEABLE:
        return Diagnosis(
            "training", "stale", f"{begin} and {s.stale:.0%} of the groups grew too old all the same: {_fresher(s)}."
        )
    if s.queue_blocks:
        return Diagnosis(
            "training",
            "queue full",
            f"Training is the bottleneck, generation stood still for {s.blocked:.0%} of the time before a full queue: "
            "add trainers or move engines to them; a larger queue would only make the data older.",
        )
    if not s.generation_held_up:
        return Diagnosis(
            "training",
            "queue grows",
            f"{begin}: add trainers or move engines to them; an --async-data-buffer-capacity-factor below 1 keeps the "
            "data fresher.",
        )
    return Diagnosis(
        "training",
        "held back",
        f"{begin}, since --max-weight-staleness lets no more groups start: add trainers, or raise it.",
    )


def _both(s: Shares) -> Diagnosis:
    begin = (
        f"Both sides wait for each other, the trainer for {s.trainer_waits:.0%} and generation for "
        f"{s.generation_waits:.0%} of the time"
    )
    if s.queue_blocks:
        return Diagnosis(
            "both",
            "bursts",
            f"{begin}: groups finish in bursts that the queue cannot hold; unless both run on the same processors, "
            "raise --async-data-buffer-capacity-factor.",
        )
    return Diagnosis(
        "both",
        "alternating",
        f"{begin}: too few groups may start before the next weights; raise --max-weight-staleness or "
        "--async-max-concurrent-samples.",
    )


def _neither(s: Shares) -> Diagnosis:
    if s.stale >= NOTICEABLE:
        return Diagnosis(
            "neither",
            "stale",
            f"Neither side waits, but {s.stale:.0%} of the groups were thrown away as too old: {_fresher(s)}.",
        )
    if s.pause >= NOTICEABLE:
        return Diagnosis(
            "weight updates",
            "pause",
            f"Weight updates are the bottleneck, the engines were paused for {s.pause:.0%} of the time: "
            f"{_FEWER_UPDATES}.",
        )
    if s.train_idle >= MUCH_OVERHEAD:
        return Diagnosis(
            "neither",
            "overhead",
            f"Neither side is a bottleneck, but the trainer stood idle for {s.train_idle:.0%} of the time between its "
            "steps, which are very short: use larger batches.",
        )
    return Diagnosis(
        "neither",
        "balanced",
        f"Neither side is a bottleneck, the trainer stood idle for {s.train_idle:.0%} and generation for "
        f"{s.generation_waits:.0%} of the time: nothing to change.",
    )


_FEWER_UPDATES = "raise --update-weights-interval, or try --pause-generation-mode in_place"


def _fresher(s: Shares) -> str:
    if s.older_in_queue:
        return "lower --async-data-buffer-capacity-factor, since they age in the queue, or raise --max-weight-staleness"
    return "lower --async-max-concurrent-samples, since they age in flight, or raise --max-weight-staleness"


class BottleneckWatch:
    """Logs every step's sentence, and shows that of several steps together: of the last `SHOW_EVERY`, or earlier of
    those that agree on a change that has lasted. The first step's is shown by itself.

    Where steps lie close to a limit their own sentences alternate; what they say together does not.
    """

    def __init__(self) -> None:
        self._recent: deque[Mapping[str, float]] = deque(maxlen=SHOW_EVERY)
        self._shown: Diagnosis | None = None
        self._steps_since = 0
        self._other: tuple[str, str] | None = None
        self._other_for = 0

    def step(self, rollout_id: int, metrics: Mapping[str, float]) -> str | None:
        """The sentence, where it is to be shown now."""
        diagnosis = diagnose(metrics, self._shown)
        if diagnosis is None:
            return None
        logger.info("step %d: %s", rollout_id + 1, diagnosis.sentence)
        self._steps_since += 1
        self._recent.append(metrics)
        now = (diagnosis.side, diagnosis.cause)
        self._other_for = self._other_for + 1 if now == self._other else 1
        self._other = now
        if self._shown is None:
            return self._show(1)
        if self._steps_since >= SHOW_EVERY:
            return self._show(SHOW_EVERY)
        if now != (self._shown.side, self._shown.cause) and self._other_for >= CHANGED_FOR:
            return self._show(CHANGED_FOR)
        return None

    def _show(self, steps: int) -> str:
        self._shown = diagnose(combined(list(self._recent)[-steps:]), self._shown)
        self._steps_since = self._other_for = 0
        assert self._shown is not None
        return self._shown.sentence if steps == 1 else f"last {steps} steps: {self._shown.sentence}"


def combined(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several steps as of one: what `diagnose` needs of them.

    Times and counts add up, shares are weighed by the steps' times, a longest is the longest of all, and what remains
    is a mean.
    """
    measured = [step for step in steps if PREFIX + "generation_idle_fraction" in step]
    if not measured:
        return {}
    times = [step.get("perf/step_time") or 0.0 for step in measured]
    result: dict[str, float] = {"steps": len(measured), "perf/step_time": sum(times)}
    for key in ("perf/train_wait_time", "perf/eval_time"):
        if any(key in step for step in measured):
            result[key] = sum(step.get(key) or 0.0 for step in measured)
    for key in {key for step in measured for key in step if key.startswith(PREFIX)}:
        values = [step.get(key) or 0.0 for step in measured]
        name = key.removeprefix(PREFIX)
        if name.endswith("_fraction"):
            result[key] = _weighed(values, times)
        elif name.endswith(("_max", "_max_seconds", "_peak")):
            result[key] = max(values)
        elif name.startswith(("groups_", "tokens_")) or name in ("sample_retries", *_SECONDS):
            result[key] = sum(values)
        else:
            result[key] = sum(values) / len(values)
    return result


_SECONDS = ("producer_blocked_seconds", "consumer_wait_seconds", "weight_update_pause_seconds")


def _weighed(values: Iterable[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else 0.0
