"""The real chain, three rollouts: what only a worker that persists across calls and updates can show."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.cpu.runs import Launcher

pytestmark = [pytest.mark.timeout(200), getattr(pytest.mark, "stage-a-cpu")]

# How soon an update meets a request half-way depends on the machine: such a run goes on until it has happened.
LONG_ANSWERS = (
    *("--custom-generate-function-path", "tests.e2e.cpu.plugins.generate_long"),
    *("--rollout-max-response-len", "200", "--async-max-concurrent-samples", "48", "--num-rollout", "100000"),
)


def test_three_rollouts_cold_start_warm_queue_and_drain_across_an_update(launcher: Launcher) -> None:
    run = launcher.run("--async-max-concurrent-samples", "32", "--check-weight-update-equal")
    cold, *warm = run.steps()
    assert [step["step"] for step in run.steps()] == [0, 1, 2]
    # Cold start: everything in the first batch was written by the first version that was published.
    assert cold["rollout/fully_async/trained_max_staleness"] == 0
    # The worker kept generating during step 0 and its update: a later batch was at least begun under older weights.
    assert max(step["rollout/fully_async/max_staleness"] for step in warm) >= 1
    for step in run.steps():
        assert step["rollout/num_groups"] == 4
        assert step["train/train_rollout_logprob_abs_diff"] < 0.2
        assert step["train/grad_norm"] >= 0
    assert cold["train/train_rollout_logprob_abs_diff"] < 1e-4  # on-policy: trainer and engine agree
    written = {path.name for path in run.run_dir.iterdir()}
    assert {"config.json", "metrics.jsonl", "timeline.jsonl", "summary.json", "report.png", "tensorboard"} <= written
    logs = {path.name for path in (run.run_dir / "logs").iterdir()}
    assert {"driver.log", "rollout_manager.log", "router.log", "engine-0.log", "trainer-0.log"} <= logs
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["groups"]["trained"] == 12
    assert summary["bottleneck"].endswith(".")
    keys = [{key for key in step if key.startswith("rollout/fully_async/groups_")} for step in run.steps()]
    assert keys[0] and keys[0] == keys[1] == keys[2]
    assert all(0 <= step["rollout/fully_async/train_idle_fraction"] <= 1 for step in run.steps())
    assert all(step["rollout/fully_async/weight_update_pause_seconds"] > 0 for step in run.steps())
    events = json.loads((run.run_dir / "trace.json").read_text())
    names = {event["name"] for event in events}
    assert {"training 1", "training 2", "training 3", "weight update", "requests in flight", "sample"} <= names
    phases = [(e["name"], e["args"]["then"]) for e in events if e["ph"] == "b" and "then" in e["args"]]
    assert phases.count(("queued", "drained")) >= 12
    assert phases.count(("drained", "trained")) == 12


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_request_that_crosses_an_update_has_tokens_of_both_versions(launcher: Launcher, mode: str) -> None:
    run = launcher.start("--pause-generation-mode", mode, *LONG_ANSWERS)
    run.wait_for_step_where(lambda step: step["rollout/weight_version/mixed_version_ratio"] > 0)
    run.send(signal.SIGINT)
    assert run.finish().sum_of("rollout/fully_async/aborted_groups_recycled") == 0


def test_mode_abort_recycles_the_groups_that_an_update_meets_in_flight(launcher: Launcher) -> None:
    run = launcher.start("--pause-generation-mode", "abort", "--sample-max-retries", "0", *LONG_ANSWERS)
    run.wait_for_step_where(lambda step: step["rollout/fully_async/aborted_groups_recycled"] > 0)
    run.send(signal.SIGINT)
    assert max(step["rollout/weight_version/mixed_version_ratio"] for step in run.finish().steps()) == 0


def test_mode_abort_replaces_the_samples_that_an_update_meets_in_flight_alone(launcher: Launcher) -> None:
    # On a fast machine several updates in a row meet the same answer: so many retries that it never is given back.
    run = launcher.start("--pause-generation-mode", "abort", "--sample-max-retries", "100000", *LONG_ANSWERS)
    replaced = "is generated again: aborted"
    run.wait_for_step_where(lambda step: replaced in (run.run_dir / "logs" / "rollout_manager.log").read_text())
    run.send(signal.SIGINT)
    finished = run.finish()
    assert finished.sum_of("rollout/fully_async/aborted_groups_recycled") == 0
    assert max(step["rollout/weight_version/mixed_version_ratio"] for step in finished.steps()) == 0
