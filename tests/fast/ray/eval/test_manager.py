"""An evaluation of a snapshot ends in an outcome, whatever the user's function does."""

from __future__ import annotations

import pickle
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest

from miles.ray.eval import manager as module
from miles.ray.eval.scores import check_versions
from miles.ray.placement_group import Bundles, BundleShape
from miles.rollout.base_types import RolloutFnEvalInput, RolloutFnEvalOutput
from miles.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkipped
from miles.utils.async_utils import use_async_loop
from miles.utils.misc import function_registry
from miles.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class ScriptedEval(CheckpointEvalFn):
    """Does what `args.script` says, and records its inputs."""

    def __init__(self, input: Any) -> None:
        super().__init__(input)
        self.data_source = input.data_source
        self.inputs: list[RolloutFnEvalInput] = []

    async def __call__(self, input: RolloutFnEvalInput) -> Any:
        self.inputs.append(input)
        return self.args.script(self)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


@pytest.fixture
async def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[module.EvalManager]:
    monkeypatch.setattr(module, "redirect_output", lambda path: None)
    monkeypatch.setattr(module, "init_http_client", lambda args: None)
    args = Namespace(
        run_dir=str(tmp_path),
        eval_function_path="scripted.Eval",
        custom_eval_rollout_log_function_path=None,
        script=lambda fn: RolloutFnEvalOutput(data={}, metrics={"eval/mine": 0.5}),
    )
    no_group: Any = None
    with use_async_loop(), function_registry.temporary("scripted.Eval", ScriptedEval):
        manager = module.EvalManager(args, Bundles(no_group, 0, BundleShape(0, 0)))
        await manager.start()
        yield manager
        await manager.dispose()


async def test_the_function_gets_directory_and_version(manager: module.EvalManager, checkpoint: Path) -> None:
    outcome = await manager.evaluate(7, str(checkpoint), "8")
    assert outcome.metrics == {"eval/mine": 0.5} and outcome.skipped is None
    assert outcome.ended >= outcome.started > 0
    assert manager._eval_fn.inputs == [RolloutFnEvalInput(7, None, weight_version="8", hf_dir=str(checkpoint))]


async def test_a_missing_checkpoint_is_not_evaluated(manager: module.EvalManager, tmp_path: Path) -> None:
    outcome = await manager.evaluate(7, str(tmp_path / "gone"), "8")
    assert outcome.skipped == "ckpt_missing" and "has no config.json and no *.safetensors" in outcome.message
    assert manager._eval_fn.inputs == []


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("script", "reason", "message"),
    [
        (lambda fn: _raise(KeyError("x")), "crashed", "KeyError: 'x'"),
        (lambda fn: _raise(EvalSkipped("no_quota", "full")), "no_quota", "full"),
        (lambda fn: 0.5, "crashed", "must return RolloutFnEvalOutput for evaluation, got float: 0.5"),
        (lambda fn: fn.data_source.get_samples(1), "crashed", "data_source.get_samples: an evaluation of snapshots"),
    ],
)
async def test_a_function_without_a_result_costs_one_point(
    manager: module.EvalManager, checkpoint: Path, script: Any, reason: str, message: str
) -> None:
    manager._args.script = script
    outcome = await manager.evaluate(7, str(checkpoint), "8")
    assert outcome.skipped == reason and message in outcome.message
    manager._args.script = lambda fn: RolloutFnEvalOutput(data={})
    assert (await manager.evaluate(8, str(checkpoint), "9")).skipped is None


def test_a_reason_is_a_metric_name_and_survives_the_way_between_processes() -> None:
    with pytest.raises(ValueError, match="reason must be made of a-z, 0-9 and _, got 'no quota'"):
        EvalSkipped("no quota")
    copy = pickle.loads(pickle.dumps(EvalSkipped("no_quota", "full")))
    assert (copy.reason, str(copy)) == ("no_quota", "full")


def test_an_answer_that_other_weights_wrote_makes_no_point() -> None:
    samples = [Sample(index=0, weight_versions=["3"]), Sample(index=1), Sample(index=2, weight_versions=["3", "4"])]
    check_versions({"set": {"samples": samples[:2]}, "no samples": {"rewards": [1]}}, "3")
    with pytest.raises(EvalSkipped, match="data set set: sample 2 was written by the weights 3, 4 instead of 3"):
        check_versions({"set": {"samples": samples}}, "3")
