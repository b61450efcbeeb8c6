"""Engines, the sentence for what does not fit, and the check before a run."""

from __future__ import annotations

import json
import logging
import random
import re
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest

from miles.tools import memory as tool
from miles.utils.memory import check
from miles.utils.memory.engine import engine_memory
from miles.utils.memory.report import Estimate
from miles.utils.memory.shape import ModelShape
from miles.utils.memory.training import GIB
from tests.fast.utils.memory.configs import QWEN3_4B, QWEN3_30B_A3B

if TYPE_CHECKING:
    from pathlib import Path

DENSE, MOE = ModelShape.from_config(QWEN3_4B), ModelShape.from_config(QWEN3_30B_A3B)
LENGTHS = {"rollout_max_prompt_len": 2048, "rollout_max_response_len": 8192}


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B), encoding="utf-8")
    return str(tmp_path)


def test_what_the_static_fraction_leaves_is_kv_cache() -> None:
    args = Namespace(rollout_num_gpus_per_engine=2, sglang_mem_fraction_static=0.7, **LENGTHS)
    engine = engine_memory(args, MOE, 80.0)
    assert engine.weights == pytest.approx(30.53e9, rel=0.002), "half of 30.5 B parameters of 2 bytes"
    assert engine.kv_bytes_per_token == 2 * 48 * 2 * 128 * 2
    assert engine.kv_bytes == 0.7 * 80 * GIB - engine.weights
    assert engine.kv_tokens == int(engine.kv_bytes // engine.kv_bytes_per_token)
    assert engine.fits


def test_more_ranks_than_kv_heads_hold_copies() -> None:
    args = Namespace(rollout_num_gpus_per_engine=8, **LENGTHS)
    assert engine_memory(args, MOE, 80.0).kv_bytes_per_token == 2 * 48 * 1 * 128 * 2


def test_the_embedded_engine_has_room_for_an_update_beside_its_weights() -> None:
    args = Namespace(rollout_engine="embedded", embedded_dtype="bfloat16", **LENGTHS)
    assert engine_memory(args, DENSE, 80.0).weights == 2 * 2 * 4_022_468_096


def test_an_engine_without_room_for_one_sample_is_told() -> None:
    args = Namespace(actor_num_gpus_per_node=8, **LENGTHS)
    problems = Estimate.from_args(args, MOE, 60.0).problems()
    assert len(problems) == 2
    assert "0 tokens of KV cache, but one sample may have 10240" in problems[1]
    assert "--rollout-num-gpus-per-engine" in problems[1]


SEARCH = {
    "use_distributed_optimizer": (False, True),
    "optimizer_cpu_offload": (False, True),
    "recompute_granularity": (None, "full"),
    "use_dynamic_batch_size": (False, True),
    "max_tokens_per_gpu": (4096, 65536),
    "rollout_max_response_len": (None, 1024, 30000),
    "rollout_max_context_len": (None, 4096),
    "tensor_model_parallel_size": (1, 8),
    "rollout_engine": ("sglang", "embedded"),
}


@pytest.mark.parametrize("seed", range(60))
def test_each_advice_changes_something_when_it_is_followed(seed: int) -> None:
    numbers = random.Random(seed)
    flags = {name: numbers.choice(values) for name, values in SEARCH.items()}
    args = Namespace(actor_num_nodes=2, actor_num_gpus_per_node=8, bf16=True, recompute_num_layers=1, **flags)
    shape = DENSE if args.tensor_model_parallel_size > 1 else numbers.choice([DENSE, MOE])
    before = Estimate.from_args(args, shape, 16.0)
    for part in ("weights", "optimizer", "activations", "logits", "update"):
        for remedy in before.training_remedies(part, lambda stage: stage.total):
            after = Estimate.from_args(remedy.applied(args), shape, 16.0)
            assert after.largest.total < before.largest.total, (remedy, flags)
    for remedy in before.engine_remedies():
        after = Estimate.from_args(remedy.applied(args), shape, 16.0)
        lacks = [e.longest * e.kv_bytes_per_token - e.kv_bytes for e in (before.engine, after.engine)]
        assert lacks[1] < lacks[0], (remedy, flags)


def advice(part: str, **flags: Any) -> list[str]:
    args = Namespace(actor_num_gpus_per_node=8, bf16=True, **flags)
    found = Estimate.from_args(args, MOE, 80.0).training_remedies(part, lambda stage: stage.total)
    return [remedy.words for remedy in found]


def test_where_one_longest_sample_binds_the_advice_is_its_length() -> None:
    batches = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 8192}
    bound = advice("logits", **batches, rollout_max_response_len=30000)
    assert "a smaller --rollout-max-response-len" in bound and "a smaller --max-tokens-per-gpu" not in bound
    bound = advice("logits", **batches)
    assert "a smaller --rollout-max-context-len" in bound and "a smaller --max-tokens-per-gpu" not in bound
    free = advice("logits", **batches, rollout_max_response_len=1024)
    assert "a smaller --max-tokens-per-gpu" in free and "a smaller --rollout-max-response-len" not in free


def test_what_is_set_already_or_breaks_a_rule_is_no_advice() -> None:
    assert "--use-distributed-optimizer" in advice("optimizer")
    assert "--use-distributed-optimizer" not in advice("optimizer", use_distributed_optimizer=True)
    assert "--use-distributed-optimizer" not in advice("optimizer", optimizer="sgd")
    assert "a larger --tensor-model-parallel-size" in advice("weights", tensor_model_parallel_size=2)
    assert "a larger --tensor-model-parallel-size" not in advice("weights", tensor_model_parallel_size=4), "4 KV heads"


def test_the_tool_takes_a_launch_scripts_words_and_exits_with_1_where_it_does_not_fit(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"--hf-checkpoint {checkpoint} --actor-num-nodes 1 --actor-num-gpus-per-node 6 --rollout-num-gpus 2 "
        "--rollout-num-gpus-per-engine 2 --pipeline-model-parallel-size 3 --context-parallel-size 2 "
        "--expert-model-parallel-size 2 --bf16 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 8192 --rollout-max-response-len 8192 "
        "--sglang-mem-fraction-static 0.7 --num-experts 128 --moe-grouped-gemm --fully-async --prompt-data none.jsonl"
    ).split()
    assert tool.main([*words, "--gpu-memory-gib", "74.5"]) == 1
    told = capsys.readouterr()
    assert "training: 6 GPUs = data 1 x tensor 1 x pipeline 3 x context 2; expert 2" in told.out
    assert "does not fit: training needs about" in told.err and "--optimizer-cpu-offload" in told.err
    assert tool.main([*words, "--gpu-memory-gib", "74.5", "--optimizer-cpu-offload"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--hf-checkpoint is required"),
        (["--hf-checkpoint", "/nowhere"], "--hf-checkpoint: /nowhere/config.json cannot be read"),
        (["--hf-checkpoint", "/nowhere", "--max-tokens-per-gpu", "many"], "--max-tokens-per-gpu"),
    ],
)
def test_wrong_words_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu-memory-gib 0", "--gpu-memory-gib must be greater than 0, got 0"),
        ("--gpu-memory-gib nan", "--gpu-memory-gib must be a finite number, got nan"),
        ("--actor-num-gpus-per-node -1", "--actor-num-gpus-per-node must be greater than 0, got -1"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size must be greater than 0, got 0"),
        ("--tensor-model-parallel-size 3", "must be a multiple of the model-parallel size (3)"),
        ("--tensor-model-parallel-size 8 --actor-num-gpus-per-node 8", "does not divide the model's 4 key/value heads"),
        ("--expert-model-parallel-size 3 --actor-num-gpus-per-node 3", "does not divide the model's 128 experts"),
        ("--rollout-num-gpus 1 --rollout-num-gpus-per-engine 4", "does not divide into engines"),
        ("--micro-batch-size 0", "--micro-batch-size must be greater than 0, got 0"),
        ("--use-dynamic-batch-size", "--use-dynamic-batch-size needs --max-tokens-per-gpu"),
        ("--sglang-mem-fraction-static 2", "--sglang-mem-fraction-static must be between 0 and 1, got 2"),
    ],
)
def test_numbers_that_no_run_may_have_are_not_estimated(
    words: str, message: str, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["--hf-checkpoint", checkpoint, *words.split()]) == 2
    told = capsys.readouterr()
    assert message in told.err and not told.out


def test_a_config_that_is_no_object_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    assert tool.main(["--hf-checkpoint", str(tmp_path)]) == 2
    assert "holds no JSON object, but a list" in capsys.readouterr().err


def test_the_other_name_of_the_number_of_experts_is_known() -> None:
    config = {**QWEN3_30B_A3B}
    config["num_local_experts"] = config.pop("num_experts")
    assert ModelShape.from_config(config) == MOE


def checked(checkpoint: str, **flags: Any) -> None:
    values: dict[str, Any] = {
        "hf_checkpoint": checkpoint,
        "gpu_memory_gib": None,
        "no_memory_check": False,
        "actor_num_gpus_per_node": 1,
        "bf16": True,
        "rollout_num_gpus_per_engine": 1,
        **LENGTHS,
    }
    check.check_memory(Namespace(**{**values, **flags}))


def test_a_run_that_cannot_fit_is_refused_and_one_that_may_not_is_warned_about(
    checkpoint: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"cannot fit: .* alone take 511\.8 GiB on a GPU of 80 GiB.*--no-memory-check"):
        checked(checkpoint, gpu_memory_gib=80.0)
    checked(checkpoint, gpu_memory_gib=80.0, no_memory_check=True)
    with caplog.at_level(logging.WARNING, "miles.utils.memory.check"):
        checked(checkpoint, gpu_memory_gib=515.0)
    assert "this run may not fit: training needs about" in caplog.text

    monkeypatch.setattr(check, "device_memory_gib", lambda: None)
    checked(checkpoint)  # no GPU is known
    monkeypatch.setattr(check, "device_memory_gib", lambda: 80.0)
    with pytest.raises(ValueError, match="cannot fit"):
        checked(checkpoint)


def test_an_offloaded_optimizer_that_the_machine_has_no_memory_for_is_warned_about(
    checkpoint: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.os, "sysconf", {"SC_PHYS_PAGES": 1024**2, "SC_PAGE_SIZE": 4096}.__getitem__)
    flags = {"gpu_memory_gib": 515.0, "bf16": True, "optimizer_cpu_offload": True}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # the trainers may be on other machines
    checked(checkpoint, **flags)
    assert "host memory" not in caplog.text
    monkeypatch.delenv("RAY_ADDRESS")
    checked(checkpoint, **flags)
    assert re.search(r"optimizer takes [4-9]\d\d\.\d GiB of host memory, and this machine has 4\.0 GiB", caplog.text)


def test_a_model_that_the_estimate_does_not_know_is_let_through(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    checked(str(tmp_path), gpu_memory_gib=1.0)
