"""Advantages and returns from rewards.

rewards (one a sample), KL to the reference, values --estimator--> per token --distillation--> --whitening--> batch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from miles.backends.training_utils.kl import KL_TYPES, estimate_kl
from miles.backends.training_utils.loss_config import ADVANTAGE_ESTIMATORS, check_choice
from miles.backends.training_utils.response_layout import ResponseLayout
from miles.backends.training_utils.whitening import masked_whiten

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.backends.training_utils.whitening import AllReduceSum


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages; the defaults are the flags' defaults."""

    advantage_estimator: str = "grpo"
    kl_coef: float = 0.0
    """Weight of the KL penalty inside the reward (not for grpo, gspo and ppo)."""
    kl_loss_type: str = "k1"
    gamma: float = 1.0
    """Discount per token, in [0, 1]."""
    lambd: float = 1.0
    """Lambda of the generalised advantage estimate, in [0, 1]; ppo only."""
    normalize_advantages: bool = False
    use_rollout_logprobs: bool = False
    use_opd: bool = False
    """On-policy distillation: a teacher's log-probabilities shape the advantages."""
    opd_kl_coef: float = 1.0

    def __post_init__(self) -> None:
        check_choice("--advantage-estimator", self.advantage_estimator, ADVANTAGE_ESTIMATORS)
        check_choice("--kl-loss-type", self.kl_loss_type, KL_TYPES)
        for flag, value in (("--gamma", self.gamma), ("--lambd", self.lambd)):
            if not 0 <= value <= 1:
                raise ValueError(f"{flag} must be in [0, 1], got {value}")
        if self.advantage_estimator == "ppo" and self.kl_coef:
            raise ValueError(f"--kl-coef must be 0 with --advantage-estimator ppo, got {self.kl_coef}")
        if self.advantage_estimator.startswith("reinforce_plus_plus") and not self.normalize_advantages:
            raise ValueError(f"--advantage-estimator {self.advantage_estimator} needs --normalize-advantages")

    @classmethod
    def from_args(cls, args: Namespace) -> AdvantageConfig:
        return cls(
            **{name: getattr(args, name) for name in cls.__dataclass_fields__ if getattr(args, name, None) is not None}
        )


def compute_advantages_and_returns(
    args: Namespace, batch: dict[str, Any], *, all_reduce_sum: AllReduceSum | None = None
) -> None:
    """Add `advantages` and `returns` (lists of [R_i] float32 tensors on the masks' device) to `batch`.

    Reads `response_lengths`, `loss_masks` and `rewards`, and where the flags call for them `log_probs` (or
    `rollout_log_probs` with --use-rollout-logprobs) and `ref_log_probs` (--kl-coef), `values` (ppo),
    `teacher_log_probs` or `opd_reverse_kl` (--use-opd). `all_reduce_sum` adds a tensor up over the data-parallel ranks
    and returns it; it is a collective, called by --normalize-advantages only.

    Raises ValueError naming the field, the sample and the rule where something is missing, not finite or too short.
    """
    config = AdvantageConfig.from_args(args)
    layout = ResponseLayout.of(batch)
    rewards = _rewards(batch, layout)
    with torch.no_grad():
        kl = _kl_to_reference(config, batch, layout)
        advantages, returns = _estimate(config, batch, layout, rewards, kl)
        if config.use_opd:
            advantages = advantages - config.opd_kl_coef * _teacher_kl(config, batch, layout)
        if config.normalize_advantages:
            advantages = masked_whiten(advantages, layout.mask, all_reduce_sum=all_reduce_sum)
    batch["advantages"] = layout.split(advantages)
    batch["returns"] = layout.split(returns)


def _estimate(
    config: AdvantageConfig,
    batch: dict[str, Any],
    layout: ResponseLayout,
    rewards: torch.Tensor,
    kl: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of the estimator, [N] each."""
    estimator = config.advantage_estimator
    if estimator in ("grpo", "gspo"):
        advantages = layout.expand(rewards)
        return advantages, advantages
    if estimator == "reinforce_plus_plus_baseline":
        advantages = layout.expand(rewards) - config.kl_coef * kl
        return advantages, advantages
    token_rewards = [
        terminal_reward(row, mask, reward)
        for row, mask, reward in zip(
            layout.split(-config.kl_coef * kl), layout.split(layout.mask), rewards.unbind(), strict=True
        )
    ]
    if estimator == "reinforce_plus_plus":
        returns = torch.cat([discounted_sums(row, config.gamma) for row in token_rewards])
        return returns, returns
    values = layout.flatten("values", batch.get("values"), needed_by="--advantage-estimator ppo")
    pairs = [
        generalized_advantages(row, value, mask, gamma=config.gamma, lambd=config.lambd)
        for row, value, mask in zip(token_rewards, layout.split(values), layout.split(layout.mask), strict=True)
    ]
    return torch.cat([advantage for advantage, _ in pairs]), torch.cat([returns for _, returns in pairs])


def terminal_reward(token_rewards: torch.Tensor, mask: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    """`token_rewards` [R] with `reward` added at the last unmasked token, and nothing where every token is masked (a
    removed sample): no token of it is trained on."""
    unmasked = mask.nonzero()
    if len(unmasked) == 0:
        return torch.zeros_like(token_rewards)
    result = token_rewards.clone()
    result[unmasked[-1]] += reward
    return result


def discounted_sums(values: torch.Tensor, discount: float) -> torch.Tensor:
    """y_t = x_t + discount * y_{t+1}, [R] -> [R], in log2(R) vector operations.

    After a pass with step s each entry holds the discounted sum of 2s values, as y[t] += discount^s * y[t + s].
    """
    sums = values.double()
    step = 1
    while step < len(sums):
        shifted = torch.zeros_like(sums)
        shifted[:-step] = sums[step:]
        sums = sums + discount**step * shifted
        step *= 2
    return sums.to(values.dtype)


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE over the unmasked tokens of one sample, as if the others were not there; advantages and returns, [R] each.

    delta_t = r_t + gamma V_{t+1} - V_t, where the value after the end is 0; A_t = delta_t + gamma lambda A_{t+1};
    returns = A + V. Masked tokens have 0 in both.

    Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation (2015), equation 16.
    """
    unmasked = mask > 0
    value = values[unmasked]
    next_value = torch.cat([value[1:], value.new_zeros(min(1, len(value)))])
    advantage = discounted_sums(rewards[unmasked] + gamma * next_value - value, gamma * lambd)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[unmasked] = advantage
    returns[unmasked] = advantage + value
    return advantages, returns


def _rewards(batch: dict[str, Any], layout: ResponseLayout) -> torch.Tensor:
    """[B] float32 on the masks' device."""
    values = batch["rewards"]
    if len(values) != len(layout.lengths):
        raise ValueError(f"rewards: {len(values)} entries for {len(layout.lengths)} samples")
    rewards = torch.tensor([float(value) for value in values], dtype=torch.float32)
    for name, reward in zip(layout.names, rewards.tolist(), strict=True):
        if reward - reward != 0:  # NaN and infinity are the numbers that do not cancel themselves
            raise ValueError(f"rewards: sample {name} has the reward {reward}; a reward must be finite")
    return rewards.to(layout.device)


def _policy_log_probs(
    config: AdvantageConfig, batch: dict[str, Any], layout: ResponseLayout, needed_by: str
) -> torch.Tensor:
    name = "rollout_log_probs" if config.use_rollout_logprobs else "log_probs"
    return layout.flatten(name, batch.get(name), needed_by=needed_by)


def _kl_to_reference(config: AdvantageConfig, batch: dict[str, Any], layout: ResponseLayout) -> torch.Tensor:
    """[N], 0 at masked tokens: what the policy thinks of a tool's output is no reason for a penalty."""
    if not config.kl_coef:
        return torch.zeros_like(layout.mask)
    flag = f"--kl-coef {config.kl_coef}"
    policy = _policy_log_probs(config, batch, layout, flag)
    reference = layout.flatten("ref_log_probs", batch.get("ref_log_probs"), needed_by=flag)
    return layout.masked(estimate_kl(policy, reference, config.kl_loss_type))


def _teacher_kl(config: AdvantageConfig, batch: dict[str, Any], layout: ResponseLayout) -> torch.Tensor:
    """student - teacher at each token, [N]: precomputed by the rollout, or from the teacher's log-probabilities."""
    if batch.get("opd_reverse_kl") is not None:
        return layout.flatten("opd_reverse_kl", batch["opd_reverse_kl"], needed_by="--use-opd")
    student = _policy_log_probs(config, batch, layout, "--use-opd")
    teacher = layout.flatten("teacher_log_probs", batch.get("teacher_log_probs"), needed_by="--use-opd")
    return student - teacher
