"""The terms of the policy gradient, per token: ratio, clipping, off-policy masking, effective sample size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from miles.backends.training_utils.response_layout import ResponseLayout

_MAX_LOG_RATIO = 20.0
"""exp(20) is 4.9e8: far outside of every clip range, and still finite in float32 with room to multiply."""


def log_ratio(
    layout: ResponseLayout, old: torch.Tensor, current: torch.Tensor, *, by_sequence: bool = False
) -> torch.Tensor:
    """old - current at each unmasked token, 0 elsewhere: [N]. With `by_sequence` (GSPO) each token has the masked
    mean of its sequence.

    GSPO: Zheng et al., Group Sequence Policy Optimization (2025), equation 7.
    """
    if by_sequence:
        return layout.expand(layout.masked_mean_by_sample(old - current))
    return layout.masked(old - current)


def clipped_objective(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each token and 1.0 where the clipped branch was the larger one: [N], [N].

    With r = exp(-ppo_kl): L = max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A), and for A < 0 with `dual_clip` = c
    L = min(L, -c A).

    Schulman et al., Proximal Policy Optimization (2017), equation 7; Ye et al., Mastering Complex Control in MOBA
    Games (2020), equation 5, for the dual clip.
    """
    ratio = (-ppo_kl).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss, (clipped > plain).float()


def opsm_weights(
    layout: ResponseLayout, old: torch.Tensor, current: torch.Tensor, advantages: torch.Tensor, *, delta: float
) -> torch.Tensor:
    """Off-policy sequence masking: 0 where A < 0 and the sequence's masked mean of old - current exceeds `delta`,
    1 elsewhere; without gradient. [N]."""
    sequence_kl = log_ratio(layout, old, current.detach(), by_sequence=True)
    return 1 - ((advantages < 0) & (sequence_kl > delta)).float()


def effective_sample_size(layout: ResponseLayout, ppo_kl: torch.Tensor, *, per_token: bool) -> torch.Tensor:
    """Sum over samples of (sum w)^2 / (n sum w^2), where w = exp(-ppo_kl) over the sample's n unmasked tokens.

    1 where all weights are equal, 1/n where one token has it all; 0 for a sample without unmasked tokens. With
    `per_token` each sample counts n times, so that dividing by the tokens of the step gives a mean here too.
    """
    weights = (-ppo_kl.detach()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    counted = (layout.mask > 0).to(torch.float64)
    weights = weights.double() * counted
    tokens = layout.sum_by_sample(counted)
    square_of_sum, sum_of_squares = layout.sum_by_sample(weights).square(), layout.sum_by_sample(weights.square())
    ratio = torch.where(tokens > 0, square_of_sum / (tokens * sum_of_squares).clamp(min=1e-300), 0.0)
    return (ratio * tokens if per_token else ratio).sum().float()
