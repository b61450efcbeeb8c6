"""A run in a Ray cluster that is there already, with trainer ranks on two of its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.cpu.ray_cluster import ray_nodes

if TYPE_CHECKING:
    from tests.e2e.cpu.runs import Launcher

pytestmark = [pytest.mark.timeout(400), getattr(pytest.mark, "stage-a-cpu")]


def test_trainer_ranks_on_two_nodes_of_a_cluster_that_is_joined(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ray_nodes(2, num_cpus=3) as environment:  # two ranks a node, an engine, the manager: all six are needed
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        run = launcher.run(*("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "2", "--check-weight-update-equal"))
    assert len(run.steps()) == 3
    assert run.steps()[0]["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert {f"trainer-{rank}.log" for rank in range(4)} <= {path.name for path in (run.run_dir / "logs").iterdir()}
