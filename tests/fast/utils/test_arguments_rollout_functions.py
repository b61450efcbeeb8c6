"""Which rollout functions run, and what --fully-async refuses."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

import pytest

from miles.utils.arguments import (
    FULLY_ASYNC_ROLLOUT_CLASS,
    STANDARD_ROLLOUT_CLASS,
    STANDARD_ROLLOUT_FUNCTION,
    check_runtime_env,
    parse_or_exit,
    resolve_rollout_function_paths,
    validate_for_async_driver,
    validate_for_sync_driver,
)

if TYPE_CHECKING:
    from tests.fast.utils.command_lines import CommandLine

ENV = "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR"
CLASS, FUNCTION, ASYNC = STANDARD_ROLLOUT_CLASS, STANDARD_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_CLASS

# class-based API, --rollout-function-path, --eval-function-path, --fully-async -> (rollout, eval). Every valid
# combination: --fully-async needs the class-based API and excludes an explicit rollout path.
RESOLUTION = [
    (False, None, None, False, (FUNCTION, FUNCTION)),
    (False, None, "my.eval", False, (FUNCTION, "my.eval")),
    (False, "my.rollout", None, False, ("my.rollout", "my.rollout")),
    (False, "my.rollout", "my.eval", False, ("my.rollout", "my.eval")),
    (True, None, None, False, (CLASS, CLASS)),
    (True, None, "my.eval", False, (CLASS, "my.eval")),
    (True, "my.rollout", None, False, ("my.rollout", "my.rollout")),
    (True, "my.rollout", "my.eval", False, ("my.rollout", "my.eval")),
    (True, None, None, True, (ASYNC, CLASS)),
    (True, None, "my.eval", True, (ASYNC, "my.eval")),
]


@pytest.mark.parametrize(("class_api", "rollout", "evaluation", "fully_async", "expected"), RESOLUTION)
def test_resolution(class_api, rollout, evaluation, fully_async, expected, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ENV, "1" if class_api else "0")
    args = Namespace(rollout_function_path=rollout, eval_function_path=evaluation, fully_async=fully_async)
    assert resolve_rollout_function_paths(args) == expected
    # Resolving what is resolved changes nothing.
    args.rollout_function_path, args.eval_function_path = expected
    assert resolve_rollout_function_paths(args) == expected


@pytest.mark.parametrize("value", ["", "0", "false", "off"])
def test_the_variable_can_be_switched_off(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ENV, value)
    args = Namespace(rollout_function_path=None, eval_function_path=None, fully_async=False)
    assert resolve_rollout_function_paths(args) == (FUNCTION, FUNCTION)


def test_parse_args_puts_the_resolved_paths_on_args(command_line: CommandLine):
    args = command_line.parse("--fully-async")
    assert (args.rollout_function_path, args.eval_function_path) == (ASYNC, CLASS)


CONFLICTS = [
    (["--colocate"], "rollout must go on while training runs"),
    (["--multi-lora-n-adapters", "2"], "brings its own rollout function"),
    (["--multi-lora-adapter", "a", "b"], "brings its own rollout function"),
    (["--rollout-function-path", "collections.OrderedDict"], "chooses the rollout function itself"),
    (["--disable-rollout-global-dataset"], "pulls prompts from the global data set"),
    (["--partial-rollout"], "a recycled group starts over"),
    (["--recompute-logprobs-via-prefill"], "score it under newer weights than wrote it"),
    (["--rollout-all-samples-process-path", "collections.OrderedDict"], "no end of a rollout"),
    (["--data-source-path", "miles.rollout.data_source.RolloutDataSource"], "cannot take back the groups"),
]


@pytest.mark.parametrize(("flags", "reason"), CONFLICTS)
def test_fully_async_refuses(flags: list[str], reason: str, command_line: CommandLine):
    with pytest.raises(ValueError) as error:
        command_line.parse("--fully-async", *flags)
    message = str(error.value)
    assert message.startswith("--fully-async")
    assert reason in message
    assert "Instead: " in message


def test_the_worker_cannot_evaluate(command_line: CommandLine):
    with pytest.raises(ValueError, match="serves training only"):
        command_line.parse("--fully-async", "--eval-function-path", ASYNC)
    with pytest.raises(ValueError, match="Instead: --fully-async"):
        command_line.parse("--rollout-function-path", ASYNC)


def test_fully_async_needs_the_class_based_api(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(ENV)
    with pytest.raises(ValueError, match=rf"--fully-async needs.*{ENV} is not set.*runtime_env"):
        command_line.parse("--fully-async")


def test_fully_async_needs_the_variable_in_rays_runtime_env():
    args = Namespace(fully_async=True)
    check_runtime_env(args, {ENV: "1"})
    check_runtime_env(Namespace(fully_async=False), {})
    for env in ({}, {ENV: "0"}):
        with pytest.raises(ValueError, match="runtime_env lacks it"):
            check_runtime_env(args, env)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_fully_async_goes_with_every_pause_mode(mode: str, command_line: CommandLine):
    assert command_line.parse("--fully-async", "--pause-generation-mode", mode).pause_generation_mode == mode


def test_train_py_refuses_fully_async(command_line: CommandLine, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        parse_or_exit(validate_for_sync_driver, argv=command_line.argv("--fully-async"))
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "train_async.py --fully-async" in captured.err
    assert "Traceback" not in captured.err


def test_train_async_py_refuses_colocate(command_line: CommandLine, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_or_exit(validate_for_async_driver, argv=command_line.argv("--colocate"))
    assert "rollout must go on while training runs" in capsys.readouterr().err


def test_train_py_updates_weights_after_every_rollout(command_line: CommandLine):
    with pytest.raises(ValueError, match="--update-weights-interval is 2"):
        validate_for_sync_driver(command_line.parse("--update-weights-interval", "2"))


def test_drivers_accept_what_they_can_do(command_line: CommandLine):
    assert parse_or_exit(validate_for_sync_driver, argv=command_line.argv()).num_rollout == 3
    assert parse_or_exit(validate_for_async_driver, argv=command_line.argv("--fully-async")).fully_async
