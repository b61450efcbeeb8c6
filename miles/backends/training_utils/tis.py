"""Truncated importance sampling: the trainer's and the engine's probabilities of the same token differ (other kernels,
other precision, older weights); the policy gradient is weighted by their ratio, within limits.

Both functions have the signature of a --custom-tis-function-path hook:
`f(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **rest)
-> (pg_loss, loss_masks, metrics)`, with `pg_loss` and each metric [N], the lists [R_i] per sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

TisResult = tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]


def vanilla_tis_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    **_: Any,
) -> TisResult:
    """Multiply by clamp(w, --tis-clip-low, --tis-clip), where w = exp(train - rollout) at each token.

    Metrics: `tis` the ratio, `tis_abs` |ratio - 1|, `tis_clipfrac` 1 where it was clamped.
    """
    ratio = _ratio(train_log_probs, rollout_log_probs)
    weight = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weight, list(loss_masks), _metrics(ratio, weight)


def icepop_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    **_: Any,
) -> TisResult:
    """Multiply by w = exp(train - rollout) where it lies in [--tis-clip-low, --tis-clip], and by 0 elsewhere.

    Metrics as in `vanilla_tis_function`; `tis_clipfrac` is 1 where the token was dropped.
    """
    ratio = _ratio(train_log_probs, rollout_log_probs)
    inside = (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)
    weight = torch.where(inside, ratio, 0.0)
    return pg_loss * weight, list(loss_masks), _metrics(ratio, weight)


def _ratio(train_log_probs: Sequence[torch.Tensor], rollout_log_probs: Sequence[torch.Tensor]) -> torch.Tensor:
    return (torch.cat(list(train_log_probs)) - torch.cat(list(rollout_log_probs))).detach().exp()


def _metrics(ratio: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"tis": ratio, "tis_clipfrac": (weight != ratio).float(), "tis_abs": (ratio - 1).abs()}
