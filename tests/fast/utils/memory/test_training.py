"""What a trainer rank needs, by layout and flags."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from miles.utils.memory.activations import Recomputation, layer_bytes, stage_bytes
from miles.utils.memory.layout import Layout
from miles.utils.memory.shape import ModelShape
from miles.utils.memory.training import (
    GIB,
    TrainingConfig,
    all_stages,
    longest_sample,
    micro_batch_tokens,
)
from tests.fast.utils.memory.configs import QWEN3_4B, QWEN3_30B_A3B

DENSE, MOE = ModelShape.from_config(QWEN3_4B), ModelShape.from_config(QWEN3_30B_A3B)
H100 = {
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 6,
    "pipeline_model_parallel_size": 3,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "bf16": True,
    "optimizer_cpu_offload": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 8192,
    "rollout_max_response_len": 8192,
}


def memory(shape: ModelShape, **flags: Any) -> list[Any]:
    return all_stages(shape, TrainingConfig.from_args(Namespace(**flags), shape))


def test_qwen3_30b_a3b_fits_six_gpus_of_80_gb_with_its_optimizer_offloaded() -> None:
    """80 GB, as an H100 has, are 74.5 GiB."""
    gpu = 80e9
    stages = memory(MOE, **H100)
    assert [stage.parameters.total / 1e9 for stage in stages] == pytest.approx([5.449, 5.138, 5.449], abs=0.001)
    assert all(stage.total < gpu for stage in stages)
    assert all(stage.host == 16 * stage.parameters.total for stage in stages)
    assert sum(stage.host for stage in stages) * 2 < 600 * GIB, "both context-parallel ranks have a copy"
    on_gpu = memory(MOE, **{**H100, "optimizer_cpu_offload": False})
    assert all(stage.least > gpu for stage in on_gpu), "which is why it is offloaded"


def test_bytes_for_each_parameter() -> None:
    def least(**flags: Any) -> float:
        (rank,) = memory(DENSE, actor_num_gpus_per_node=1, **flags)
        return float(rank.least / rank.parameters.total)

    assert least() == 4 + 4 + 8
    assert least(bf16=True) == 2 + 4 + 12
    assert least(bf16=True, optimizer="sgd") == 2 + 4 + 8
    assert least(bf16=True, optimizer_cpu_offload=True) == 2 + 4
    assert least(bf16=True, use_kl_loss=True) == 2 + 4 + 12 + 2
    assert least(bf16=True, kl_coef=0.0) == 2 + 4 + 12


def test_a_distributed_optimizer_is_spread_over_ranks_with_the_same_parameters() -> None:
    (dense,) = memory(DENSE, actor_num_gpus_per_node=4, bf16=True, use_distributed_optimizer=True)
    assert dense.optimizer == 12 * dense.parameters.total // 4
    (moe,) = memory(
        MOE, actor_num_gpus_per_node=8, expert_model_parallel_size=4, bf16=True, use_distributed_optimizer=True
    )
    assert moe.optimizer == 12 * moe.parameters.dense // 8 + 12 * moe.parameters.expert // 2
    (context,) = memory(
        DENSE, actor_num_gpus_per_node=4, context_parallel_size=4, bf16=True, use_distributed_optimizer=True
    )
    assert context.optimizer == dense.optimizer, "context-parallel ranks hold the same parameters"


def test_recomputation_keeps_layer_inputs_and_the_layers_at_hand() -> None:
    layout, tokens = Layout(world=1), 1000
    a_layer, an_input = layer_bytes(DENSE, layout, 2), 2 * DENSE.hidden

    def kept(*recomputation: Any) -> float:
        return stage_bytes(DENSE, layout, Recomputation(*recomputation), stage=0, tokens=tokens, itemsize=2) / tokens

    assert kept() == kept("selective") == 36 * a_layer
    assert kept("full", "uniform", 1) == 36 * an_input + a_layer
    assert kept("full", "uniform", 4) == 9 * an_input + 4 * a_layer
    assert kept("full", "block", 10) == pytest.approx(26 * a_layer + 10 * an_input + a_layer)


def test_a_dense_layer_is_counted_tensor_by_tensor() -> None:
    """h 8, 2 heads of 4, 1 KV head, ffn 16, bf16: see the comments of layer_bytes."""
    small = ModelShape.from_config(
        {**QWEN3_4B, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
        | {"intermediate_size": 16}
    )
    assert layer_bytes(small, Layout(world=1), 2) == 2 * (4 * 8 + (16 + 12 + 12 + 8) + 64) + 8
    assert layer_bytes(small, Layout(world=2, tensor=2), 2) == 2 * (4 * 8 + 48 / 2 + 64 / 2) + 4
    with_sequence = Layout(world=2, tensor=2, sequence_parallel=True)
    assert layer_bytes(small, with_sequence, 2) == layer_bytes(small, Layout(world=1), 2) / 2


def test_the_first_stage_holds_most_micro_batches() -> None:
    layout = Layout(world=4, pipeline=4)
    assert [layout.micro_batches_in_flight(i) for i in range(4)] == [4, 3, 2, 1]
    assert Layout(world=4, pipeline=4, virtual=3).micro_batches_in_flight(0) == 4 * (1 + 3 / 12)


def test_layers_of_stages() -> None:
    assert Layout(world=3, pipeline=3).stage_layers(MOE) == [16, 16, 16]
    assert Layout(world=3, pipeline=3, first_layers=10, last_layers=8).stage_layers(MOE) == [10, 30, 8]
    assert Layout(world=2, pipeline=2, last_layers=20).stage_layers(MOE) == [28, 20]
    with pytest.raises(ValueError, match="--pipeline-model-parallel-size 5 does not divide the 48 layers"):
        Layout(world=5, pipeline=5).stage_layers(MOE)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"actor_num_gpus_per_node": 6, "tensor_model_parallel_size": 4}, "6 trainer ranks .* no multiple"),
        ({"actor_num_gpus_per_node": 6, "expert_model_parallel_size": 4}, "6 trainer ranks .* multiple of --expert"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "--num-virtual-stages-per-pipeline-rank 2 needs --pipeline"),
        ({"actor_num_gpus_per_node": 3, "expert_model_parallel_size": 3}, "3 does not divide the 128 experts"),
        ({"actor_num_gpus_per_node": 6, "tensor_model_parallel_size": 3}, "3 does not divide the 32 attention heads"),
    ],
)
def test_sizes_that_do_not_divide_are_named(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        memory(MOE, **flags)


def test_tokens_of_a_micro_batch() -> None:
    def tokens(context_parallel: int = 1, **flags: Any) -> int:
        return micro_batch_tokens(Namespace(**flags), DENSE, context_parallel)

    lengths = {"rollout_max_prompt_len": 1000, "rollout_max_response_len": 3000}
    assert longest_sample(Namespace(), DENSE) == 40960
    assert longest_sample(Namespace(rollout_max_response_len=3000), DENSE) == 5048
    assert longest_sample(Namespace(**lengths, rollout_max_context_len=3500), DENSE) == 3500
    assert tokens(**lengths, micro_batch_size=2) == 8000
    assert tokens(**lengths, use_dynamic_batch_size=True, max_tokens_per_gpu=9000) == 9000
    assert tokens(**lengths, use_dynamic_batch_size=True, max_tokens_per_gpu=100) == 4000, "a longer sample goes alone"
    assert tokens(4, **lengths, use_dynamic_batch_size=True, max_tokens_per_gpu=100) == 1000
