"""The load-balancing loss that is reported is the one of its formula, whatever is trained before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fast.backends.megatron_utils.tiny_models import CONFIGS, make_args, make_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

NAME = "train/load_balancing_loss"


def by_hand(checkpoint: Path, micro_batches: Sequence[Sequence[list[int]]]) -> float:
    """experts * sum over experts of (share of the choices) * (mean probability), as in the Switch Transformer
    (https://arxiv.org/abs/2101.03961), by Hugging Face's model; the mean over layers and micro-batches."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    experts, chosen = CONFIGS["qwen3-moe"]["num_experts"], CONFIGS["qwen3-moe"]["num_experts_per_tok"]
    losses = []
    for samples in micro_batches:
        with torch.no_grad():
            outputs = [model(torch.tensor([tokens]), output_router_logits=True).router_logits for tokens in samples]
        for of_layer in zip(*outputs, strict=True):
            probabilities = torch.cat(of_layer).softmax(-1)
            choices = probabilities.topk(chosen).indices
            shares = torch.bincount(choices.flatten(), minlength=experts) / choices.numel()
            losses.append((experts * shares * probabilities.mean(0)).sum().item())
    assert len(losses) == len(micro_batches) * CONFIGS["qwen3-moe"]["num_hidden_layers"]
    return sum(losses) / len(losses)


def test_it_is_the_mean_over_layers_and_micro_batches(
    checkpoints: dict[str, Path], trainer_of: Callable[..., Any]
) -> None:
    checkpoint, shard = checkpoints["qwen3-moe"], make_shard(seed=5)
    tokens = shard["tokens"]
    flags = {"moe_aux_loss_coeff": 0.1, "lr": 0.0}
    trainer = trainer_of(make_args(checkpoint, **flags, micro_batch_size=3))
    expected = by_hand(checkpoint, [tokens[:3], tokens[3:6], tokens[6:]])
    for rollout in range(2):  # nothing of the first is left in the second
        assert trainer.train(rollout, shard)[NAME] == pytest.approx(expected, abs=1e-5)
    # Two optimizer steps, recomputed, with a pass for log-probabilities before them: each token counts once.
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    trainer = trainer_of(make_args(checkpoint, **flags, **recompute, global_batch_size=4, micro_batch_size=2))
    shard["global_batch_size"] = 4
    expected = by_hand(checkpoint, [tokens[:2], tokens[2:4], tokens[4:6], tokens[6:]])
    assert trainer.train(0, shard)[NAME] == pytest.approx(expected, abs=1e-5)


def test_it_is_named_after_what_it_balances_and_absent_where_nothing_is(
    checkpoints: dict[str, Path], trainer_of: Callable[..., Any]
) -> None:
    def reported(name: str, **flags: Any) -> set[str]:
        metrics = trainer_of(make_args(checkpoints[name], **flags)).train(0, make_shard(seed=5))
        return {key for key in metrics if "balancing" in key}

    assert reported("qwen3-moe", moe_aux_loss_coeff=0.1) == {NAME}
    for kind, key in (("seq_aux_loss", "train/seq_load_balancing_loss"), ("none", None)):
        found = reported("qwen3-moe", moe_aux_loss_coeff=0.1, moe_router_load_balancing_type=kind)
        assert found == ({key} if key else set())
    found = reported("qwen3-moe", moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="global_aux_loss")
    assert found == {"train/global_load_balancing_loss"}
    assert reported("qwen3-moe") == set()
    assert reported("qwen3-tied", moe_aux_loss_coeff=0.1) == set()
