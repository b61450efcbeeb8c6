"""Evaluation while generation goes on: on the engines of training, on engines of its own, by a user's class."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput, RolloutFnEvalOutput
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
from miles.utils.eval_config import EvalDatasetConfig
from miles.utils.http_utils import close_http_client, find_available_port, wait_http_ok
from miles.utils.processes import ChildProcess
from tests.fast.rollout.engine_stub import make_args

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.cpu.runs import Launcher

pytestmark = [pytest.mark.timeout(240), getattr(pytest.mark, "stage-a-cpu")]

LONG_ANSWERS = [
    *("--custom-generate-function-path", "tests.e2e.cpu.plugins.generate_long"),
    *("--rollout-max-response-len", "96", "--async-max-concurrent-samples", "48"),
]


def test_evaluation_on_engines_of_its_own_measures_snapshots_while_training_goes_on(
    launcher: Launcher, tmp_path: Path
) -> None:
    release, snapshots = tmp_path / "release", tmp_path / "snapshots"
    run = launcher.start(
        *("--num-rollout", "6", "--eval-interval", "2", "--eval-num-gpus", "1", "--eval-keep-snapshots", "9"),
        *("--eval-hf-dir", str(snapshots), "--eval-config", eval_config(tmp_path, launcher.data, release)),
    )
    # The evaluations of the first weights and of step 1 are held, yet training takes step after step: as far as
    # --eval-max-in-flight 2 lets it, which is to the end of step 3, where a third evaluation is due.
    run.wait_for_steps(3)
    release.touch()
    finished = run.finish()
    assert finished.exit_code == 0, finished.output
    assert len(finished.steps()) == 6

    points = finished.evaluations()
    assert [(p["step"], p["eval/weight_version"], p["eval/steps_trained"]) for p in points] == [
        (0, 1, 0),
        (1, 3, 2),
        (3, 5, 4),
        (5, 7, 6),
    ]
    first, second, *_, last = points
    assert first["eval/lag_steps"] >= 3 and second["eval/lag_steps"] >= 1 and last["eval/lag_steps"] == 0
    assert first["eval/export_time_seconds"] == 0 < second["eval/export_time_seconds"]
    assert all(p["eval/duration_seconds"] > 0 for p in points)
    assert sorted(path.name for path in snapshots.iterdir()) == [
        "step_1_version_3",
        "step_3_version_5",
        "step_5_version_7",
    ]
    names = {"eval_manager.log", "eval-router.log", "eval-engine-0.log"}
    assert names <= {path.name for path in (finished.run_dir / "logs").iterdir()}

    prompts = str(first_prompts(tmp_path, launcher.data))
    direct = asyncio.run(score_directly(snapshots / "step_5_version_7", prompts, tmp_path))
    assert last["eval/sort"] == pytest.approx(direct)


def test_evaluation_on_the_engines_of_training_aborts_no_group(launcher: Launcher, tmp_path: Path) -> None:
    run = launcher.run(
        *("--num-rollout", "4", "--eval-interval", "2", "--eval-temperature", "0"),
        *("--eval-prompt-data", "sort", str(first_prompts(tmp_path, launcher.data))),
        *LONG_ANSWERS,
    )
    assert [(p["step"], p["eval/weight_version"], p["eval/lag_steps"]) for p in run.evaluations()] == [
        (0, 1, 0),
        (1, 3, 0),
        (3, 5, 0),
    ]
    assert run.sum_of("rollout/fully_async/aborted_groups_recycled") == 0
    assert len(run.steps()) == 4  # submission went on after each evaluation


def test_a_users_evaluation_gets_checkpoints_and_its_failures_do_not_end_training(launcher: Launcher) -> None:
    run = launcher.run(
        *("--eval-interval", "1", "--eval-function-path", "tests.e2e.cpu.plugins.CountWeights"),
        driver="train.py",
        fully_async=False,
    )
    points = {(p["step"], p["eval/weight_version"]): p for p in run.evaluations()}
    assert list(points) == [(0, 1), (0, 2), (1, 3), (2, 4)]
    assert points[0, 1]["eval/bytes"] > 0  # the model that training starts from
    assert points[0, 2]["eval/skipped_crashed"] == 1
    assert points[1, 3]["eval/skipped_no_quota"] == 1
    assert points[2, 4]["eval/bytes"] > 0
    assert len(run.steps()) == 3
    assert "skipped (crashed)" in run.output and "the harness broke" in run.output


def first_prompts(directory: Path, data: Path) -> Path:
    """A data set of sixteen held-out prompts."""
    path = directory / "few.jsonl"
    rows = (data / "eval.jsonl").read_text().splitlines()[:16]
    path.write_text("\n".join(rows) + "\n")
    return path


def eval_config(directory: Path, data: Path, release: Path) -> str:
    """Greedy answers that wait for `release`."""
    path = directory / "eval.yaml"
    dataset = {
        "name": "sort",
        "path": str(first_prompts(directory, data)),
        "temperature": 0.0,
        "custom_generate_function_path": "tests.e2e.cpu.plugins.generate_when_released",
        "metadata_overrides": {"release": str(release)},
    }
    path.write_text(yaml.safe_dump({"datasets": [dataset]}))
    return str(path)


async def score_directly(model: Path, prompts: str, directory: Path) -> float:
    """The mean reward of greedy answers of an engine that was started on `model`."""
    port = find_available_port(0)
    command = [sys.executable, "-m", "miles.backends.embedded_engine", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--device", "cpu"]
    engine = ChildProcess("engine", command, directory / "engine.log")
    try:
        await wait_http_ok(f"http://127.0.0.1:{port}/health")
        args = make_args(
            hf_checkpoint=str(model),
            sglang_router_port=port,
            custom_rm_path="examples.quickstart.reward.reward",
            rm_type=None,
            rollout_max_response_len=12,
            rollout_skip_special_tokens=True,
            eval_datasets=[EvalDatasetConfig("sort", prompts, label_key="label", temperature=0.0, max_response_len=12)],
        )
        no_data: Any = None
        output = await InferenceRolloutFn(RolloutFnConstructorInput(args, no_data))(RolloutFnEvalInput(0))
        assert isinstance(output, RolloutFnEvalOutput)
        rewards = output.data["sort"]["rewards"]
        return sum(rewards) / len(rewards)
    finally:
        await close_http_client()
        await engine.stop()
