"""Two thousand simulated trainings with everything that can go wrong, each invariant checked after each event.

A failure prints its seed and a minimal trace. Replay: `python -m miles.sim --seed N`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field

import pytest

import miles.rollout.fully_async_rollout as heart
from miles.sim.__main__ import TRACE_LINES_OF_A_FAILURE, describe, main
from miles.sim.coverage import CONSEQUENCES, Coverage
from miles.sim.schedule import Fault, FaultKind, Schedule
from miles.sim.shrink import minimal
from miles.sim.simulation import SimulationFailed, simulate
from miles.utils.misc import function_registry
from miles.utils.user_calls import _replaced
from tests.fast.sim.mutations import eval_forgets_to_resume

SEEDS, BLOCK = 2000, 250
LEAST_MEDIAN_EVENTS = 300
LEAST_SHARE = 0.05


@dataclass
class Tally:
    coverage: Coverage = field(default_factory=Coverage)
    seconds: float = 0.0


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def explain(failed: SimulationFailed) -> str:
    smallest = minimal(failed)
    trace = "\n".join(smallest.trace.lines(last=TRACE_LINES_OF_A_FAILURE))
    return f"{failed}\n\nminimal {describe(smallest.schedule)}\n{trace}\n{smallest}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_no_seed_breaks_a_promise(first, tally):
    began = time.process_time()
    for seed in range(first, first + BLOCK):
        try:
            tally.coverage.add(simulate(Schedule.from_seed(seed)))
        except SimulationFailed as failed:
            pytest.fail(explain(failed), pytrace=False)
    tally.seconds += time.process_time() - began


def test_the_seeds_cover_every_kind_of_fault(tally, record_property):
    coverage = tally.coverage
    if coverage.runs < SEEDS:
        pytest.skip(f"only {coverage.runs} of {SEEDS} seeds were run")
    # The time is shown and not judged: it is the machine's as much as ours.
    record_property("shown", f"{coverage.table()}\n{tally.seconds:.1f} s of processor time")
    assert coverage.rare(LEAST_SHARE) == []
    assert coverage.median_events >= LEAST_MEDIAN_EVENTS
    assert [name for name in CONSEQUENCES if coverage.consequences[name] < LEAST_SHARE * coverage.runs] == []


@pytest.mark.parametrize("seed", [1, 9])
def test_a_seed_gives_the_same_run_in_every_process(seed):
    traces = [_replay(seed, hash_seed) for hash_seed in ("1", "2")]
    assert traces[0] == traces[1]
    assert f"seed {seed}: " in traces[0]


def _replay(seed: int, hash_seed: str) -> str:
    command = [sys.executable, "-m", "miles.sim", "--seed", str(seed)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.getcwd()}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=50).stdout


def test_a_schedule_is_a_function_of_its_seed():
    assert Schedule.from_seed(7) == Schedule.from_seed(7)
    assert Schedule.from_seed(7) != Schedule.from_seed(8)


def test_without_faults_nothing_goes_wrong():
    report = simulate(Schedule(steps=6))
    assert not report.fired
    assert not any(report.trace.met(name) for name in CONSEQUENCES if name != "save")


def _times(report, kind):
    return [at for at, name, _ in report.trace.events if name == kind]


def test_where_all_engines_hang_the_run_ends_with_no_progress_in_time():
    hang = Fault(FaultKind.ENGINES_HANG, 3.0, seconds=8.0)
    report = simulate(Schedule(steps=4, no_progress_timeout=45.0, faults=(hang,)))
    (at,) = _times(report, "no progress")
    began = max(t for kind in ("drain start", "drained") for t in _times(report, kind) if t < at)
    assert at - began == pytest.approx(45.0, abs=1e-3)
    assert report.trace.met("process crashed")  # and the next process, with engines that answer, finishes the run
    without = simulate(Schedule(steps=4, faults=(hang,)))
    assert not without.trace.met("no progress")


def test_where_the_filter_drops_everything_the_run_ends_with_its_budget():
    drops = Fault(FaultKind.FILTER_DROPS_MANY, 2, seconds=6.0)
    report = simulate(Schedule(steps=4, max_empty_batches=3, faults=(drops,)))
    ends = [details for _, kind, details in report.trace.events if kind == "nothing gets through"]
    assert ends == [(6,), (6,)]  # two processes in a row, before the budget is raised
    assert not simulate(Schedule(steps=4, faults=(drops,))).trace.met("nothing gets through")


@pytest.mark.parametrize("groups", [1, 4, 5])
def test_finite_data_ends_when_all_of_it_is_accounted_for(groups):
    report = simulate(Schedule(steps=9, data_groups=groups))
    batches = [details[1] for _, kind, details in report.trace.events if kind == "train start"]
    assert sorted(index for batch in batches for index in batch) == list(range(groups))
    assert [len(batch) for batch in batches] == [2] * (groups // 2) + [1] * (groups % 2)
    assert len(_times(report, "end of data")) == 2  # and again, where somebody asks again


@pytest.mark.parametrize(("store", "kind"), [("newest_first", None), ("refusing", "store refuses")])
def test_a_custom_store_decides_which_groups_come_next(store, kind):
    report = simulate(Schedule(steps=8, train_seconds=6.0, capacity_factor=1.0, store=store))
    assert kind is None or report.trace.met(kind)


def test_evaluation_on_the_engines_of_training_lets_what_is_in_flight_go_on():
    kinds = (FaultKind.EVAL, FaultKind.EVAL_FAILS, FaultKind.EVAL_CANCELLED)
    faults = tuple(Fault(kind, step, seconds=0.5) for step, kind in enumerate(kinds))
    report = simulate(Schedule(steps=5, train_seconds=0.0, async_max_concurrent_samples=8, faults=faults))
    names = [kind for _, kind, _ in report.trace.events]
    ends = [names.index("eval end", start) for start, kind in enumerate(names) if kind == "eval start"]
    spans = [names[names.index("eval start", end - names[end::-1].index("eval start")) : end] for end in ends]
    assert ["eval failed" in span for span in spans] == [False, True, False]
    assert ["eval cancelled" in span for span in spans] == [False, False, True]
    assert any("answer" in span for span in spans)
    assert not any("pull" in span for span in spans)


def test_a_failed_run_leaves_the_rollout_module_as_it_was(monkeypatch):
    before = {name: getattr(heart, name) for name in ("get", "OUTPUT_QUEUE_MAX_GROUPS", "generate_and_rm_group")}
    eval_forgets_to_resume(monkeypatch)
    next(_failures())
    assert {name: getattr(heart, name) for name in before} == before
    assert function_registry.get("simulated_generate") is None
    assert _replaced.get() is None


@pytest.mark.timeout(120)
def test_a_failing_schedule_is_shrunk_to_what_makes_it_fail(monkeypatch):
    eval_forgets_to_resume(monkeypatch)
    failed = next(_failures())
    smallest = minimal(failed).schedule
    assert {fault.kind for fault in smallest.faults} <= {FaultKind.EVAL, FaultKind.EVAL_FAILS, FaultKind.EVAL_CANCELLED}
    assert len(smallest.faults) == 1
    assert len(smallest.differences()) < len(failed.schedule.differences())


def _failures():
    for seed in range(50):
        try:
            simulate(Schedule.from_seed(seed))
        except SimulationFailed as failed:
            yield failed


def test_the_command_line_explains_a_failure(monkeypatch, capsys):
    eval_forgets_to_resume(monkeypatch)
    seed = next(_failures()).schedule.seed
    assert main(["--seed", str(seed)]) == 1
    text = capsys.readouterr().out
    assert "fault: eval" in text
    assert f"FAILED seed {seed}: " in text


def test_the_command_line_prints_the_coverage_of_a_range(capsys):
    assert main(["--seeds", "0:3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("3 runs, ")
    assert all(kind.value in text for kind in FaultKind)
