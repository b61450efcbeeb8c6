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
from miles.sim.schedule import FaultKind, Schedule
from miles.sim.shrink import minimal
from miles.sim.simulation import SimulationFailed, simulate
from miles.utils.misc import function_registry
from miles.utils.user_calls import _replaced
from tests.fast.sim.mutations import eval_forgets_to_resume

SEEDS, BLOCK = 2000, 250
SECONDS = 90.0
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


def test_the_seeds_cover_every_kind_of_fault(tally, capsys):
    coverage = tally.coverage
    if coverage.runs < SEEDS:
        pytest.skip(f"only {coverage.runs} of {SEEDS} seeds were run")
    with capsys.disabled():
        print(f"\n{coverage.table()}\n{tally.seconds:.1f} s of processor time")  # noqa: T201 - the point of the test
    assert coverage.rare(LEAST_SHARE) == []
    assert coverage.median_events >= LEAST_MEDIAN_EVENTS
    assert [name for name in CONSEQUENCES if coverage.consequences[name] < LEAST_SHARE * coverage.runs] == []
    assert tally.seconds < SECONDS  # processor time, so that a busy machine does not make it fail


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
    assert {fault.kind for fault in smallest.faults} <= {FaultKind.EVAL, FaultKind.EVAL_FAILS}
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
