"""The launch scripts for GPUs and clusters end in command lines that the driver accepts, as far as it can tell here.

What may be refused is what the release refuses by name today (`miles/utils/refused_values.py`): as rows go there, this
test asks for more by itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from examples.fully_async.run_qwen3_30b_a3b_fully_async import Launch, parse
from miles.backends.megatron_utils import flags as trainer_flags
from miles.tools.memory import estimate
from miles.utils.arguments import check_runtime_env
from tests.contracts.gpu_scripts import ROOT, Command, Shims, Verdict, check, make_checkpoint, make_math_data
from tests.e2e.megatron.fully_async_run import H100, flags, write_arithmetic

EXAMPLES = ROOT / "examples" / "fully_async"
VARIABLE = "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR"


@pytest.fixture
def shims(tmp_path: Path) -> Shims:
    directory = tmp_path / "bin"
    directory.mkdir()
    return Shims(directory)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """MODEL (30B-A3B unless a test makes another), DATA and OUT of the scripts."""
    return {
        "MODEL": str(make_checkpoint(tmp_path / "Qwen3-30B-A3B", "Qwen3-30B-A3B")),
        "DATA": str(make_math_data(tmp_path / "data")),
        "OUT": str(tmp_path / "out"),
    }


@pytest.fixture
def verdict_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    return lambda command, has_gpus=True: check(command, monkeypatch, caplog, has_gpus=has_gpus)


def assert_nothing_is_wrong(verdict: Verdict) -> None:
    assert verdict.mistakes == []
    assert verdict.args is not None or verdict.not_yet
    assert [line for line in verdict.warnings if "no effect" in line and not hints_at_a_later_release(line)] == []


def hints_at_a_later_release(line: str) -> bool:
    """A flag of the trainer that will have an effect once its row in `NO_EFFECT` is gone."""
    return line.partition(" ")[0][2:].replace("-", "_") in trainer_flags.NO_EFFECT


def assert_it_fits(command: Command) -> None:
    """Trainer and engines are expected to fit GPUs of 80 GB."""
    assert estimate([*command.argv[1:], "--gpu-memory-gib", "80"]).problems() == []


def value_of(command: Command, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


def test_the_one_node_script(tmp_path: Path, shims: Shims, places: dict[str, str], verdict_on) -> None:
    model = str(make_checkpoint(tmp_path / "Qwen3-4B", "Qwen3-4B"))
    script = str(EXAMPLES / "run-qwen3-4b-fully_async.sh")
    command = shims.last_command_of(["bash", script], **{**places, "MODEL": model})
    assert command.environment[VARIABLE] == "1"
    assert command.cwd == str(ROOT)
    assert "--dynamic-sampling-filter-path" in command.argv
    assert int(value_of(command, "--actor-num-gpus-per-node")) + int(value_of(command, "--rollout-num-gpus")) == 8
    assert_nothing_is_wrong(verdict_on(command))
    assert_it_fits(command)


def test_its_further_arguments_come_last(tmp_path: Path, shims: Shims, places: dict[str, str]) -> None:
    script = str(EXAMPLES / "run-qwen3-4b-fully_async.sh")
    command = shims.last_command_of(["bash", script, "--lr", "0"], **places)
    assert command.argv[-2:] == ["--lr", "0"]


@pytest.mark.parametrize("missing", ["MODEL", "DATA"])
def test_it_says_which_place_it_needs(missing: str, shims: Shims, places: dict[str, str]) -> None:
    del places[missing]
    with pytest.raises(AssertionError, match=f"set {missing} to"):
        shims.last_command_of(["bash", str(EXAMPLES / "run-qwen3-4b-fully_async.sh")], **places)


def test_the_python_launcher(shims: Shims, places: dict[str, str], verdict_on) -> None:
    script = str(EXAMPLES / "run_qwen3_30b_a3b_fully_async.py")
    command = shims.last_command_of(
        [
            *(sys.executable, script, "--model", places["MODEL"], "--data", places["DATA"], "--out", places["OUT"]),
            *("--python", str(shims.directory / "python"), "--", "--seed", "7"),
        ]
    )
    assert command.environment[VARIABLE] == "1"
    assert command.environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert command.argv[-2:] == ["--seed", "7"]
    assert_nothing_is_wrong(verdict_on(command))
    assert_it_fits(command)


def test_the_python_launcher_can_only_show_the_command(
    places: dict[str, str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.fully_async.run_qwen3_30b_a3b_fully_async import main

    words = ["--model", places["MODEL"], "--data", places["DATA"], "--out", places["OUT"], "--print"]
    monkeypatch.setattr(sys, "argv", ["run", *words])
    main()
    assert f"{VARIABLE}=1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"train_gpus_per_node": 5}, "5 training GPUs do not divide into copies of the model of 6"),
        ({"expert_parallel": 4}, "do not divide by expert parallel 4 x pipeline 3"),
        ({"rollout_gpus": 3}, "3 rollout GPUs do not divide into engines of 2"),
    ],
)
def test_the_python_launcher_refuses_sizes_that_do_not_fit(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Launch(model="m", data="d", out="o", **sizes)


def test_the_multi_node_job(shims: Shims, places: dict[str, str], verdict_on) -> None:
    submitted = shims.last_command_of(["bash", str(EXAMPLES / "ray-job-qwen3-30b-a3b.sh"), "--seed", "7"], **places)
    assert submitted.argv[:2] == ["job", "submit"]
    (address,) = [word for word in submitted.argv if word.startswith("--address=")]
    assert address == "--address=http://127.0.0.1:8265"
    (runtime_env,) = [word for word in submitted.argv if word.startswith("--runtime-env-json=")]
    env_vars = json.loads(runtime_env.partition("=")[2])["env_vars"]
    assert env_vars[VARIABLE] == "1"
    assert all(isinstance(value, str) for value in env_vars.values())  # Ray refuses numbers
    assert "MILES_HOST_IP" not in env_vars  # it would be the same on all nodes
    assert int(env_vars["RAY_JOB_STOP_WAIT_TIME_S"]) > 15  # the processes of a run that is stopped are gone by then
    entrypoint = submitted.argv[submitted.argv.index("--") + 1 :]
    assert entrypoint[:2] == ["python", str(EXAMPLES / "run_qwen3_30b_a3b_fully_async.py")]
    launch, print_only, further = parse(entrypoint[2:])
    assert not print_only and further == ["--seed", "7"]
    command = Command(launch.command(further)[1:], env_vars | launch.environment(), str(ROOT))
    assert value_of(command, "--actor-num-nodes") == "2" and value_of(command, "--rollout-num-gpus") == "16"
    assert_it_fits(command)
    verdict = verdict_on(command)
    assert_nothing_is_wrong(verdict)
    if verdict.args is not None:
        check_runtime_env(verdict.args, env_vars)


def test_a_head_node_without_gpus_can_drive_it(places: dict[str, str], verdict_on) -> None:
    launch = Launch(model=places["MODEL"], data=places["DATA"], out=places["OUT"])
    command = Command(launch.command([])[1:], launch.environment(), str(ROOT))
    verdict = verdict_on(command, has_gpus=False)
    assert verdict.mistakes == []
    assert verdict.args is not None or verdict.not_yet


def test_the_run_of_the_8_gpu_test(tmp_path: Path, places: dict[str, str], verdict_on) -> None:
    prompts = write_arithmetic(tmp_path / "prompts.jsonl", count=64, as_messages=True)
    words = flags(H100, checkpoint=Path(places["MODEL"]), prompts=prompts, runs_dir=tmp_path / "runs")
    assert H100.trainers + H100.rollout_gpus == 8
    command = Command(["train_async.py", *words], {VARIABLE: "1"}, str(ROOT))
    assert_nothing_is_wrong(verdict_on(command))
    assert_it_fits(command)


def test_a_mistake_in_a_script_is_found(places: dict[str, str], verdict_on) -> None:
    launch = Launch(model=places["MODEL"], data=places["DATA"], out=places["OUT"])
    further = ["--colocate", "--lr", "-1", "--no-such-flag"]
    command = Command(launch.command(further[:3])[1:], launch.environment(), str(ROOT))
    mistakes = "\n".join(verdict_on(command).mistakes)
    assert "--colocate" in mistakes and "--lr" in mistakes
    command = Command(launch.command(further)[1:], launch.environment(), str(ROOT))
    assert "--no-such-flag" in "\n".join(verdict_on(command).mistakes)


def test_without_the_environment_variable_it_is_refused(places: dict[str, str], verdict_on) -> None:
    launch = Launch(model=places["MODEL"], data=places["DATA"], out=places["OUT"])
    verdict = verdict_on(Command(launch.command([])[1:], {}, str(ROOT)))
    assert any(VARIABLE in line for line in verdict.mistakes)
