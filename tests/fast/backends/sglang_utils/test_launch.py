"""The command line of an SGLang server, from the run's flags; nothing of SGLang is needed for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from miles.backends.sglang_utils.flags import server_flags
from miles.backends.sglang_utils.launch import ServerPlace, meeting_point, nccl_environment, sglang_engine_command
from tests.fast.utils.command_lines import CommandLine

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

PLACE = ServerPlace(host="10.0.0.1", port=30000, nccl_port=30001)


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.setattr("miles.backends.sglang_utils.server_rules.sglang_installed", lambda: True)
    return CommandLine.create(tmp_path)


def parse(command_line: CommandLine, *flags: str) -> Namespace:
    return command_line.parse("--rollout-engine", "sglang", *flags)


def command(args: Namespace, place: ServerPlace = PLACE, seed: int = 0) -> list[str]:
    return sglang_engine_command(args, place, seed=seed)


def options(words: list[str]) -> dict[str, Any]:
    """Flag -> its value; None for one without."""
    found: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if following.startswith("--") else following
    return found


def test_an_engine_on_one_machine(command_line: CommandLine) -> None:
    args = parse(command_line, "--rollout-seed", "5")
    words = command(args, seed=2)
    assert words[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert options(words[3:]) == {
        "--model-path": str(command_line.checkpoint),
        "--host": "10.0.0.1",
        "--port": "30000",
        "--nccl-port": "30001",
        "--tp-size": "1",
        "--nnodes": "1",
        "--node-rank": "0",
        "--base-gpu-id": "0",
        "--random-seed": "7",
        "--skip-server-warmup": None,
    }


def test_each_flag_of_the_user_is_passed_in_sglangs_own_spelling_after_the_defaults(command_line: CommandLine) -> None:
    args = parse(
        command_line,
        *("--sglang-mem-fraction-static", "0.7", "--sglang-tensor-parallel-size", "1"),
        *("--sglang-attention-backend", "torch_native", "--sglang-disable-radix-cache"),
        *("--sglang-cuda-graph-bs-decode", "1", "2", "--no-sglang-lora-strict-loading"),
        *("--sglang-enable-fused-qk-norm-rope", "--sglang-cuda-graph-max-bs", "64"),
    )
    words = command(args)
    passed = words[words.index("--skip-server-warmup") + 1 :]
    assert " ".join(passed).split(" --") == [
        "--mem-fraction-static 0.7",
        "disable-radix-cache",
        "attention-backend torch_native",
        "cuda-graph-bs-decode 1 2",
        "enable-fused-qk-norm-rope",
        "no-lora-strict-loading",
        "cuda-graph-max-bs-decode 64",
    ]


def test_an_engine_over_two_machines_meets_at_one_address(command_line: CommandLine) -> None:
    args = parse(command_line, "--rollout-num-gpus-per-engine", "4", "--num-gpus-per-node", "2")
    address = meeting_point("fd00::1", 25000)
    places = [ServerPlace("10.0.0.1", 30000, 30001, 2, rank, address) for rank in range(2)]
    head, other = (options(command(args, place)) for place in places)
    assert head["--tp-size"] == other["--tp-size"] == "4"
    assert head["--nnodes"] == other["--nnodes"] == "2"
    assert (head["--node-rank"], other["--node-rank"]) == ("0", "1")
    assert head["--dist-init-addr"] == other["--dist-init-addr"] == "[fd00::1]:25000"


def test_the_python_of_the_engines_can_be_another_one(command_line: CommandLine, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    assert command(parse(command_line, "--sglang-python", str(python)))[0] == str(python)


def test_engines_with_another_nccl_than_the_trainers_are_refused_where_there_is_a_gpu(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 2.28.9\n")
    python.chmod(0o755)
    rules = "miles.backends.sglang_utils.server_rules"
    monkeypatch.setattr(f"{rules}.nccl_version", lambda: "2.29.3")
    parse(command_line, "--sglang-python", str(python))  # without a GPU the group is one of gloo
    monkeypatch.setattr(f"{rules}.cuda_device_present", lambda: True)
    with pytest.raises(ValueError, match=r"its NCCL is 2\.28\.9 and that of the trainer 2\.29\.3"):
        parse(command_line, "--sglang-python", str(python))
    monkeypatch.setattr(f"{rules}.nccl_version", lambda: "2.28.9")
    parse(command_line, "--sglang-python", str(python))


def test_the_list_names_its_version() -> None:
    assert "tp_size" in {flag.dest for flag in server_flags()}
    from miles.backends.sglang_utils import flags

    first = (flags.Path(flags.__file__).parent / "server_flags.tsv").read_text().splitlines()[0]
    assert first == "# sglang 0.5.23: names, dest, kind, type"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sglang-pp-size", "2"], "--sglang-pp-size 2 is refused: SGLang gives the stages of a pipeline the same"),
        (["--sglang-dp-size", "2"], "--sglang-dp-size 2 is refused: SGLang updates the weights of one replica only"),
        (["--sglang-api-key", "k"], "--sglang-api-key k is refused"),
        (["--sglang-tp-size", "2"], "--sglang-tp-size 2 is not --rollout-num-gpus-per-engine 1"),
        (["--rollout-num-gpus-per-engine", "8"], "8 does not divide the 4 attention heads"),
        (
            ["--rollout-num-gpus-per-engine", "4", "--num-gpus-per-node", "3"],
            "--rollout-num-gpus-per-engine 4 does not divide into nodes of --num-gpus-per-node 3",
        ),
        (
            ["--rollout-num-gpus-per-engine", "2", "--rollout-num-gpus", "3"],
            "--rollout-num-gpus 3 does not divide into engines of --rollout-num-gpus-per-engine 2",
        ),
        (["--sglang-mem-fraction-statc", "1"], "unknown flag --sglang-mem-fraction-statc; did you mean --sglang-mem"),
        (["--sglang-python", "/no/such/python"], "--sglang-python /no/such/python: there is no such program"),
        (["--sglang-python", "/bin/false"], "--sglang-python /bin/false: it lacks the package sglang"),
        (
            ["--check-weight-update-equal"],
            "--check-weight-update-equal with --rollout-engine sglang: its /weights_checker gives sums of its own",
        ),
        (["--pause-generation-mode", "in_place"], "in_place with --rollout-engine sglang needs --sglang-disable-radix"),
        (["--rollout-external"], "--rollout-external and --rollout-external-engine-addrs belong together"),
        (["--rollout-external-engine-addrs", "a:1"], "belong together"),
        (["--rollout-external", "--rollout-external-engine-addrs", "a"], "'a' is not host:port"),
        (["--rollout-external", "--rollout-external-engine-addrs", "a:1", "http://a:1"], "names an engine twice"),
        (["--rollout-external-router"], "--rollout-external-router needs --sglang-router-ip and --sglang-router-port"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(flags: list[str], message: str, command_line: CommandLine) -> None:
    with pytest.raises(ValueError) as error:
        parse(command_line, *flags)
    assert message in str(error.value)


def test_in_place_is_fine_without_the_prefix_cache(command_line: CommandLine) -> None:
    parse(command_line, "--pause-generation-mode", "in_place", "--sglang-disable-radix-cache")


def test_sglang_must_be_installed(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles.backends.sglang_utils.server_rules.sglang_installed", lambda: False)
    with pytest.raises(ValueError, match=r"the package sglang is not installed here. Instead: .* --sglang-python"):
        parse(command_line)


def test_external_engines_are_counted_and_need_no_package(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles.backends.sglang_utils.server_rules.sglang_installed", lambda: False)
    addresses = ("--rollout-external", "--rollout-external-engine-addrs", "a:1", "http://b:2")
    args = parse(command_line, *addresses, "--rollout-num-gpus-per-engine", "4")
    assert (args.rollout_num_gpus, args.rollout_num_gpus_per_engine) == (8, 4)


@pytest.mark.parametrize(
    ("cuda", "installed", "python", "expected"),
    [
        (True, True, None, "sglang"),
        (True, False, "python", "sglang"),
        (True, False, None, "there is no sglang here. Instead: --rollout-engine embedded"),
        (False, True, None, "there is no CUDA device here. Instead: --rollout-engine embedded"),
    ],
)
def test_sglang_is_the_default_where_it_can_run(
    cuda: bool,
    installed: bool,
    python: str | None,
    expected: str,
    command_line: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("miles.utils.arguments.cuda_device_present", lambda: cuda)
    monkeypatch.setattr("miles.utils.arguments.sglang_installed", lambda: installed)
    monkeypatch.setattr("miles.backends.sglang_utils.server_rules._require_sglang", lambda python: None)
    flags = ["--sglang-python", python] if python else []
    if expected == "sglang":
        assert command_line.parse(*flags, without=("--rollout-engine",)).rollout_engine == "sglang"
        return
    with pytest.raises(ValueError) as error:
        command_line.parse(*flags, without=("--rollout-engine",))
    assert expected in str(error.value)


def test_what_the_model_can_read_is_known_from_its_config(command_line: CommandLine) -> None:
    assert parse(command_line).engine_vocab_size == 100


def test_nccl_is_set_up_alike_on_both_sides_of_a_weight_update(command_line: CommandLine) -> None:
    def variables(*flags: str) -> dict[str, str]:
        return nccl_environment(parse(command_line, *flags))

    assert variables() == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert variables("--sglang-enable-symm-mem") == {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}
    assert variables("--sglang-enable-nccl-nvls") == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}
    assert nccl_environment(command_line.parse()) == {}
