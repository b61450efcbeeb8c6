"""Which way of evaluating the flags choose, and what they refuse."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from miles.rollout.checkpoint_eval import CheckpointEvalFn
from miles.rollout.eval_flags import EvalWay, eval_way
from miles.utils.misc import function_registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fast.utils.command_lines import CommandLine


class MyEval(CheckpointEvalFn):
    def __call__(self, input: Any) -> Any: ...


@pytest.fixture(autouse=True)
def _my_eval() -> Iterator[None]:
    with function_registry.temporary("my.Eval", MyEval):
        yield


@pytest.fixture
def data(command_line: CommandLine) -> tuple[str, ...]:
    return ("--eval-interval", "2", "--eval-prompt-data", "some", str(command_line.prompts))


def test_evaluation_uses_the_engines_of_training_unless_told_otherwise(
    command_line: CommandLine, data: tuple[str, ...]
) -> None:
    assert eval_way(command_line.parse()) is EvalWay.SHARED
    args = command_line.parse(*data)
    assert eval_way(args) is EvalWay.SHARED
    defaults = (args.eval_num_gpus, args.eval_num_gpus_per_engine, args.eval_hf_dir)
    assert defaults == (0, 1, None)
    assert (args.eval_max_in_flight, args.eval_overflow_policy, args.eval_keep_snapshots) == (2, "backpressure", 2)


def test_engines_of_its_own(command_line: CommandLine, data: tuple[str, ...]) -> None:
    args = command_line.parse(*data, "--eval-num-gpus", "4", "--eval-num-gpus-per-engine", "2")
    assert eval_way(args) is EvalWay.DEDICATED


def test_a_checkpoint_eval_function_needs_no_data(command_line: CommandLine) -> None:
    args = command_line.parse("--eval-interval", "2", "--eval-function-path", "my.Eval")
    assert eval_way(args) is EvalWay.CHECKPOINT_FN


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--eval-num-gpus", "3", "--eval-num-gpus-per-engine", "2"], "--eval-num-gpus 3 does not divide into engines"),
        (["--eval-num-gpus", "-1"], "--eval-num-gpus must be at least 0, got -1"),
        (["--eval-max-in-flight", "0"], "--eval-max-in-flight must be greater than 0, got 0"),
        (["--eval-keep-snapshots", "-1"], "--eval-keep-snapshots must be at least 0, got -1"),
        (
            ["--eval-num-gpus", "1", "--eval-function-path", "my.Eval"],
            "--eval-num-gpus 1 does not go together with --eval-function-path my.Eval: a CheckpointEvalFn gets",
        ),
        (
            ["--eval-num-gpus", "1", "--eval-function-path", "nowhere.Eval"],
            "--eval-function-path 'nowhere.Eval': importing it raised ValueError: .*there is no module 'nowhere'",
        ),
    ],
)
def test_what_is_refused(command_line: CommandLine, data: tuple[str, ...], flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command_line.parse(*data, *flags)


def test_engines_that_would_never_be_used_are_refused(command_line: CommandLine) -> None:
    with pytest.raises(ValueError, match="reserves engines that would never be used: set --eval-interval too"):
        command_line.parse("--eval-num-gpus", "1")


def test_flags_of_snapshots_without_snapshots_are_reported(
    command_line: CommandLine, data: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        command_line.parse(*data, "--eval-keep-snapshots", "5")
    assert "--eval-keep-snapshots has no effect: no snapshots are evaluated" in caplog.text
