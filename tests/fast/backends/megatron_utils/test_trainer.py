"""What one call of `train` does, against an independent implementation and against itself cut differently."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fast.backends.megatron_utils.tiny_models import make_args, make_shard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    TrainerOf = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.hf_named_tensors()}


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, tensor in left.items():
        difference = (tensor - right[name]).abs().max().item()
        assert difference <= tolerance, f"{name}: {difference}"


class Reference:
    """Hugging Face's model, PyTorch's AdamW, and the loss written out sample by sample."""

    def __init__(self, directory: Path, args: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.args = args
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": args.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(args.adam_beta1, args.adam_beta2))

    def step(self, shard: dict[str, Any]) -> tuple[float, float]:
        """One on-policy step with truncated importance sampling: (loss, gradient norm)."""
        total = torch.zeros(())
        for i, tokens in enumerate(shard["tokens"]):
            logits = self.model(torch.tensor([tokens])).logits[0]
            chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:]).view(-1, 1)).flatten()
            current = chosen[len(chosen) - shard["response_lengths"][i] :]
            mask = torch.tensor(shard["loss_masks"][i], dtype=torch.float32)
            ratio = (current - current.detach()).exp()
            weight = (current.detach() - torch.tensor(shard["rollout_log_probs"][i])).exp().clamp(0, 2.0)
            total = total + (-ratio * shard["rewards"][i] * weight * mask).sum() / mask.sum().clamp(min=1)
        loss = total / len(shard["tokens"])
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_grad)
        self.optimizer.step()
        return loss.item(), norm.item()


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-untied"])
def test_three_steps_equal_an_independent_implementation(
    name: str, checkpoints: dict[str, Path], trainer_of: TrainerOf
) -> None:
    args = make_args(checkpoints[name], use_tis=True, tis_clip=2.0, tis_clip_low=0.0, micro_batch_size=3, lr=1e-3)
    trainer, reference = trainer_of(args), Reference(checkpoints[name], args)
    for i in range(3):
        shard = make_shard(seed=i)
        loss, norm = reference.step(shard)
        metrics = trainer.train(i, shard)
        assert metrics["train/loss"] == pytest.approx(loss, abs=1e-5)
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    expected = {n: p.detach() for n, p in reference.model.named_parameters()}
    assert_same_weights(weights(trainer), expected, 2e-5)


def test_micro_batches_do_not_change_the_step(checkpoints: dict[str, Path], trainer_of: TrainerOf) -> None:
    results = []
    for overrides in (
        {"micro_batch_size": 8},
        {"micro_batch_size": 1},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 30},
    ):
        trainer = trainer_of(make_args(checkpoints["qwen3-tied"], **overrides))
        metrics = trainer.train(0, make_shard(seed=3))
        results.append((metrics, weights(trainer)))
    for metrics, tensors in results[1:]:
        assert metrics["train/loss"] == pytest.approx(results[0][0]["train/loss"], abs=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(results[0][0]["train/grad_norm"], rel=1e-5)
        assert_same_weights(tensors, results[0][1], 1e-5)


def test_reusing_the_forward_pass_changes_no_number(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles.backends.megatron_utils.trainer import MegatronTrainer

    args = make_args(checkpoints["qwen3-tied"], use_tis=True, tis_clip=2.0, tis_clip_low=0.0, micro_batch_size=3)
    reused = trainer_of(args)
    assert reused._can_reuse_forward(1) and not reused._can_reuse_forward(2)
    left = [reused.train(i, make_shard(seed=i)) for i in range(2)], weights(reused)
    assert "perf/log_probs_time" not in left[0][0]
    monkeypatch.setattr(MegatronTrainer, "_can_reuse_forward", lambda self, steps: False)
    recomputed = trainer_of(args)
    right = [recomputed.train(i, make_shard(seed=i)) for i in range(2)], weights(recomputed)
    assert "perf/log_probs_time" in right[0][0]
    for a, b in zip(left[0], right[0], strict=True):
        keys = {key for key in a if not key.startswith("perf/")}
        assert keys == {key for key in b if not key.startswith("perf/")}
        assert all(a[key] == pytest.approx(b[key], abs=1e-6) for key in keys)
    assert_same_weights(left[1], right[1], 1e-6)


@pytest.mark.filterwarnings("ignore:If you are using transformer_engine:UserWarning")
def test_recomputing_only_attention_takes_no_number_of_layers(
    checkpoints: dict[str, Path], trainer_of: TrainerOf
) -> None:
    ignored = {"recompute_method": "uniform", "recompute_num_layers": 1}
    args = make_args(checkpoints["qwen3-tied"], recompute_granularity="selective", **ignored)
    trainer_of(args).train(0, make_shard(seed=0))


@pytest.mark.parametrize(
    "overrides",
    [{"use_rollout_logprobs": True}, {"kl_coef": 0.1}, {"loss_type": "sft_loss"}, {"attention_dropout": 0.1}],
    ids=str,
)
def test_the_forward_pass_is_not_reused_where_the_numbers_would_differ(
    overrides: dict[str, Any], checkpoints: dict[str, Path], trainer_of: TrainerOf
) -> None:
    assert not trainer_of(make_args(checkpoints["qwen3-tied"], **overrides))._can_reuse_forward(1)


def test_several_optimizer_steps_share_the_log_probs_from_before_the_first(
    checkpoints: dict[str, Path], trainer_of: TrainerOf
) -> None:
    args = make_args(checkpoints["qwen3-tied"], global_batch_size=4, lr=5e-3)
    trainer = trainer_of(args)
    metrics = trainer.train(0, make_shard(seed=1, samples=8, global_batch_size=4))
    assert metrics["train/step"] == 2
    assert "perf/log_probs_time" in metrics
    assert metrics["train/ppo_kl"] != 0, "the second step's policy is not the one before the first"


def test_learning_rate_zero_leaves_the_weights_exactly_as_they_are(
    checkpoints: dict[str, Path], trainer_of: TrainerOf
) -> None:
    trainer = trainer_of(make_args(checkpoints["qwen3-tied"], lr=0.0))
    before = weights(trainer)
    for i in range(2):
        assert trainer.train(i, make_shard(seed=i))["train/grad_norm"] > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())


def test_warm_up_rises_from_zero_and_linear_decay_falls(checkpoints: dict[str, Path], trainer_of: TrainerOf) -> None:
    args = make_args(checkpoints["qwen3-tied"], lr=1.0e-3, lr_warmup_iters=2, lr_decay_style="linear", num_rollout=6)
    trainer = trainer_of(args)
    rates = [trainer.train(i, make_shard(seed=i))["train/lr-pg_0"] for i in range(6)]
    assert rates == pytest.approx([0.0, 0.5e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_kl_loss_compares_with_the_frozen_reference(checkpoints: dict[str, Path], trainer_of: TrainerOf) -> None:
    args = make_args(
        checkpoints["qwen3-tied"], use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", ref_load=None, lr=5e-3
    )
    trainer = trainer_of(args)
    first, second = (trainer.train(i, make_shard(seed=i)) for i in range(2))
    assert first["train/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert second["train/kl_loss"] > 1e-4
    assert second["rollout/ref_log_probs"] != pytest.approx(second["rollout/log_probs"])


def test_per_token_loss_is_normalised_by_the_tokens_of_the_step(
    checkpoints: dict[str, Path], trainer_of: TrainerOf
) -> None:
    shard = make_shard(seed=5)
    shard["rollout_log_probs"] = [[0.0] * n for n in shard["response_lengths"]]
    trainer = trainer_of(make_args(checkpoints["qwen3-tied"], calculate_per_token_loss=True, micro_batch_size=2))
    metrics = trainer.train(0, shard)
    tokens = sum(sum(mask) for mask in shard["loss_masks"])
    expected = -sum(sum(mask) * r for mask, r in zip(shard["loss_masks"], shard["rewards"], strict=True)) / tokens
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-5)


def test_metrics_are_the_documented_ones(checkpoints: dict[str, Path], trainer_of: TrainerOf) -> None:
    args = make_args(checkpoints["qwen3-tied"], use_tis=True, tis_clip=2.0, tis_clip_low=0.0)
    metrics = trainer_of(args).train(0, make_shard(seed=0))
    train = "loss pg_loss ppo_kl pg_clipfrac grad_norm lr-pg_0 train_rollout_logprob_abs_diff tis tis_clipfrac step"
    rollout = "rewards raw_reward log_probs rollout_log_probs advantages"
    wanted = [f"train/{n}" for n in train.split()] + [f"rollout/{n}" for n in rollout.split()]
    wanted += ["perf/actor_train_time", "perf/actor_train_tok_per_s"]
    assert not [name for name in wanted if name not in metrics]
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_a_nan_gradient_is_an_error_or_skips_the_step(checkpoints: dict[str, Path], trainer_of: TrainerOf) -> None:
    def poison(trainer: Any) -> None:
        """Put a NaN into the reduced gradients of each step."""
        finish = trainer._stages[0].finish_grad_sync

        def poisoned(*args: Any, **kwargs: Any) -> None:
            finish(*args, **kwargs)
            trainer._stages[0].buffers[0].grad_data[0] = math.nan

        trainer._stages[0].finish_grad_sync = poisoned

    checked = trainer_of(make_args(checkpoints["qwen3-tied"]))
    poison(checked)
    with pytest.raises(FloatingPointError, match=r"nan.*--no-check-for-nan-in-loss-and-grad"):
        checked.train(0, make_shard(seed=0))
    skipping = trainer_of(make_args(checkpoints["qwen3-tied"], check_for_nan_in_loss_and_grad=False))
    before = weights(skipping)
    poison(skipping)
    metrics = skipping.train(0, make_shard(seed=0))
    assert math.isnan(metrics["train/grad_norm"]) and metrics["train/step"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(skipping).items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rollout_log_probs": [[0.0]] * 8}, ["rollout_log_probs", "sample"]),
        ({"tokens": []}, ["no samples"]),
        ({"global_batch_size": 3}, ["global-batch-size", "3"]),
    ],
)
def test_a_shard_that_does_not_fit_is_a_clear_error(
    change: dict[str, Any], words: list[str], checkpoints: dict[str, Path], trainer_of: TrainerOf
) -> None:
    trainer = trainer_of(make_args(checkpoints["qwen3-tied"]))
    with pytest.raises(ValueError) as error:
        trainer.train(0, {**make_shard(seed=0), **change})
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size"),
        ({"use_distributed_optimizer": True, "optimizer": "sgd"}, "--use-distributed-optimizer"),
        ({"optimizer": "muon"}, "--optimizer"),
        ({"lr_warmup_iters": 10, "lr_decay_iters": 10}, "--lr-warmup-iters"),
        ({"min_lr": 1.0}, "--min-lr"),
        ({"pause_generation_mode": "stop"}, "--pause-generation-mode"),
    ],
)
def test_flags_that_cannot_work_are_refused_by_name(
    overrides: dict[str, Any], words: str, checkpoints: dict[str, Path], trainer_of: TrainerOf
) -> None:

    with pytest.raises(ValueError, match=words):
        trainer_of(make_args(checkpoints["qwen3-tied"], **{"lr_decay_style": "linear", **overrides}))


def test_hooks_are_called_with_their_documented_arguments(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path
) -> None:
    from tests.fast.backends.megatron_utils import recording_hooks

    module = "tests.fast.backends.megatron_utils.recording_hooks."
    args = make_args(
        checkpoints["qwen3-tied"],
        save=str(tmp_path),
        global_batch_size=4,
        custom_megatron_init_path=module + "init",
        custom_megatron_before_log_prob_hook_path=module + "before_log_prob",
        custom_megatron_before_train_step_hook_path=module + "before_train_step",
        custom_megatron_post_save_hook_path=module + "post_save",
    )
    recording_hooks.calls.clear()
    trainer = trainer_of(args)
    trainer.train(7, make_shard(seed=0, global_batch_size=4))
    path = trainer.save(7)
    model, optimizer, scheduler = trainer._stages, trainer._optimizer, trainer._scheduler
    assert recording_hooks.calls == [
        ("init", (args,)),
        ("before_log_prob", (args, model, "")),
        ("before_train_step", (args, 7, 0, model, optimizer, scheduler)),
        ("before_train_step", (args, 7, 1, model, optimizer, scheduler)),
        ("post_save", (args, 7, path, path)),
    ]
    assert not trainer._can_reuse_forward(1), "the hook before the log-prob pass needs that pass"
