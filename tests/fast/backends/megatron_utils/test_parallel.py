"""A model split over ranks trains like the same model on one rank: processes over gloo, one world for all layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fast.backends.megatron_utils.parallel_main import Job, assert_equal, run, run_world
from tests.fast.backends.megatron_utils.tiny_models import CONFIGS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"), pytest.mark.timeout(300)]

TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
CP = "context_parallel_size"
VPP = "num_virtual_stages_per_pipeline_rank"
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}
LOSS = {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.0, "entropy_coef": 0.01}
TOKENS = {"calculate_per_token_loss": True, "normalize_advantages": True, "micro_batch_size": 3}
STEPS = {  # two optimizer steps a rollout: the log-probabilities before the first are computed in a pass of their own
    "global_batch_size": 4,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "k3",
    "observe_training_entropy": True,
}
CUSTOM = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": "tests.fast.backends.megatron_utils.parallel_main.spread_of_logits",
    "compute_advantages_and_returns": False,
}
LAYOUTS = {
    "untied": ("tensor-pipeline", "interleaved-distributed"),
    "tokens": ("data", "context-sequence", "tensor-pipeline"),
    "steps": ("tensor-pipeline", "interleaved", "context-pipeline"),
    "custom": ("tensor-pipeline",),
    "balanced": ("sequence", "context-sequence"),
}
DENSE = {
    "data": {},
    "data-distributed": {"use_distributed_optimizer": True},
    "tensor": {TP: 2},
    "pipeline": {PP: 2},
    "pipeline-4": {PP: 4},
    "tensor-pipeline": {TP: 2, PP: 2, **DYNAMIC},
    "interleaved": {PP: 2, VPP: 2, "micro_batch_size": 1},
    "interleaved-distributed": {PP: 2, VPP: 2, "use_distributed_optimizer": True, **DYNAMIC},
    "tensor-distributed": {TP: 2, "use_distributed_optimizer": True},
    "sequence": {TP: 2, PP: 2, "sequence_parallel": True},
    "context": {CP: 2, **DYNAMIC},
    "uneven-pipeline": {PP: 2, "decoder_first_pipeline_num_layers": 1},
    "context-sequence": {CP: 2, TP: 2, "sequence_parallel": True, "use_distributed_optimizer": True},
    "context-pipeline": {CP: 2, PP: 2},
    "recompute-selective": {TP: 2, CP: 2, "recompute_granularity": "selective"},
    "recompute": {
        TP: 2,
        PP: 2,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}

EP = "expert_model_parallel_size"
ETP = "expert_tensor_parallel_size"
SP = {"sequence_parallel": True}
SPLITS: dict[str, dict[str, Any]] = {"tensor": {TP: 2}, "pipeline": {PP: 2}, "tensor bf16": {TP: 2, "bf16": True}}
MOE = {
    "experts": {EP: 2},
    "experts-distributed": {EP: 2, "use_distributed_optimizer": True},
    "experts-tensor": {EP: 2, TP: 2, ETP: 1, **SP},
    "tensor": {TP: 2, ETP: 2, **SP},
    "tensor-but-experts": {TP: 2, ETP: 1, **SP},
    "nothing-but-experts": {ETP: 2},
    "pipeline": {PP: 2},
    "data": {},
    "context": {CP: 2, EP: 2, ETP: 1},
}
BALANCED = {**LOSS, "moe_aux_loss_coeff": 0.1, "micro_batch_size": 1}  # each micro-batch is balanced by itself
BALANCED_LAYOUTS = ("experts", "pipeline", "tensor", "context")


def test_every_layout_of_four_ranks_equals_one(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    steps = {**STEPS, "ref_load": str(checkpoints["qwen3-deep-tied"])}
    losses = {"tied": LOSS, "untied": LOSS, "tokens": TOKENS, "steps": steps, "custom": CUSTOM, "balanced": BALANCED}
    models = {"tied": str(checkpoints["qwen3-deep-tied"]), "untied": str(checkpoints["qwen2-deep-untied"])}
    models |= dict.fromkeys(("tokens", "steps", "custom"), models["tied"])
    models["balanced"] = str(checkpoints["qwen3-moe"])
    jobs = [
        Job(f"{model} {layout}", checkpoint, {**losses[model], **flags})
        for model, checkpoint in models.items()
        for layout, flags in DENSE.items()
        if layout in LAYOUTS.get(model, DENSE)
    ]
    ranks = run_world(jobs, 4, tmp_path)
    expected = {model: run(Job(model, checkpoint, losses[model])) for model, checkpoint in models.items()}
    for job in jobs:
        for rank, results in enumerate(ranks):
            assert_equal(results[job.name], expected[job.name.split()[0]], (job.name, rank))
        assert ranks[0][job.name]["weights"], job.name


def test_what_a_stage_sends_is_whole_however_late_it_is_received(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Interleaved stages go on while they send, and gloo sends from the memory itself."""
    checkpoint = str(checkpoints["qwen3-deep-tied"])
    flags = {**LOSS, PP: 2, VPP: 2, "micro_batch_size": 1}
    ranks = run_world([Job("late", checkpoint, flags, rollouts=(0,))], 2, tmp_path, main="parallel_late_main")
    expected = run(Job("at once", checkpoint, LOSS, rollouts=(0,)))
    for results in ranks:
        assert_equal(results["late"], expected, "late")


@pytest.fixture(scope="module")
def two_ranks(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Per rank {job: result}; importing megatron-core takes seconds, so one world does everything that needs two."""
    experts = str(checkpoints["qwen3-moe"])
    jobs = [Job(layout, experts, {**LOSS, **flags}) for layout, flags in MOE.items()]
    jobs += [Job(f"balanced {layout}", experts, {**BALANCED, **MOE[layout]}) for layout in BALANCED_LAYOUTS]
    for name, checkpoint in checkpoints.items():
        for split, flags in SPLITS.items():
            sequence = SP if "moe" in name and TP in flags else {}
            jobs.append(Job(f"{name} {split}", str(checkpoint), {**flags, **sequence}, rollouts=()))
    jobs.append(Job("qwen3-moe experts", experts, {EP: 2}, rollouts=()))
    return run_world(jobs, 2, tmp_path_factory.mktemp("two_ranks"))


def test_experts_on_two_ranks_equal_one(checkpoints: dict[str, Path], two_ranks: list[dict[str, Any]]) -> None:
    expected = run(Job("one", str(checkpoints["qwen3-moe"]), LOSS))
    for name in MOE:
        for rank, results in enumerate(two_ranks):
            assert_equal(results[name], expected, (name, rank))
    balanced = run(Job("balanced", str(checkpoints["qwen3-moe"]), BALANCED))
    for layout in BALANCED_LAYOUTS:
        for rank, results in enumerate(two_ranks):
            assert_equal(results[f"balanced {layout}"], balanced, (layout, rank))
    assert all("train/load_balancing_loss" in metrics for metrics in balanced["metrics"])
    router = "model.layers.0.mlp.gate.weight"
    difference = balanced["weights"][router] - expected["weights"][router]
    assert difference.abs().max() > 1e-5, "the load-balancing loss moves the router"


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_every_family_come_out_of_every_split_bit_for_bit(
    name: str, checkpoints: dict[str, Path], two_ranks: list[dict[str, Any]]
) -> None:
    original = load_file(checkpoints[name] / "model.safetensors")
    splits = [split for split in (*SPLITS, "experts") if f"{name} {split}" in two_ranks[0]]
    assert len(splits) == len(SPLITS) + (name == "qwen3-moe")
    for split in splits:
        here, elsewhere = (results[f"{name} {split}"]["weights"] for results in two_ranks)
        assert here.keys() == original.keys() and not elsewhere, split
        dtype = torch.bfloat16 if "bf16" in split else torch.float32
        assert all(torch.equal(here[key], tensor.to(dtype)) for key, tensor in original.items()), split
