"""The losses of a micro-batch: policy, value, supervised and custom.

    logits --response_log_probs--> log-probabilities, entropies
    log-probabilities + old, reference, engine log-probabilities + advantages
        --ratio, clip--> per token --OPSM, TIS--> per token --reduce--> sum over samples

A micro-batch is a dictionary of per-sample lists: `tokens`, `total_lengths`, `response_lengths`, `loss_masks`,
`advantages`, `returns`, `log_probs` (the trainer's, before the step), `ref_log_probs`, `rollout_log_probs` (the
engine's), `values`, `sample_indices`; those that the flags do not call for may be absent.

Every loss returns `(loss, metrics)`. The loss and each metric are **sums over the samples** of masked means (or over
the tokens, with --calculate-per-token-loss): added up over micro-batches and data-parallel ranks and divided by the
samples (tokens) of the optimizer step, they are the step's numbers whatever the cutting into micro-batches was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from miles.backends.training_utils.kl import estimate_kl
from miles.backends.training_utils.log_probs import response_log_probs
from miles.backends.training_utils.loss_config import LossConfig
from miles.backends.training_utils.policy_terms import (
    clipped_objective,
    effective_sample_size,
    log_ratio,
    opsm_weights,
)
from miles.backends.training_utils.reduce import TokenReducer
from miles.backends.training_utils.response_layout import ResponseLayout
from miles.backends.training_utils.tis import icepop_function, vanilla_tis_function
from miles.utils.user_calls import UserCode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "LossConfig",
    "icepop_function",
    "loss_from_logits",
    "policy_loss",
    "sft_loss",
    "value_loss",
    "vanilla_tis_function",
]

LossAndMetrics = tuple[torch.Tensor, dict[str, torch.Tensor]]


def loss_from_logits(
    config: LossConfig,
    micro_batch: Mapping[str, Any],
    logits: torch.Tensor,
    tokens: torch.Tensor,
    **split: Any,
) -> LossAndMetrics:
    """The loss that --loss-type names. `logits` [T, V] and `tokens` [T] are the packed row of the micro-batch.

    `split`: how the logits are split over ranks, as for `response_log_probs`; a custom loss needs all of them.
    """
    if config.loss_type == "custom_loss":
        return _custom_loss(config, micro_batch, logits)
    log_probs, entropies = response_log_probs(
        logits,
        tokens,
        micro_batch["total_lengths"],
        micro_batch["response_lengths"],
        temperature=config.temperature if config.loss_type == "policy_loss" else 1.0,
        with_entropy=config.needs_entropy and config.loss_type == "policy_loss",
        **split,
    )
    if config.loss_type == "sft_loss":
        return sft_loss(config, micro_batch, log_probs)
    return policy_loss(config, micro_batch, log_probs, entropies)


def policy_loss(
    config: LossConfig,
    micro_batch: Mapping[str, Any],
    log_probs: Sequence[torch.Tensor],
    entropies: Sequence[torch.Tensor] | None = None,
) -> LossAndMetrics:
    """reduce(clipped policy gradient) - entropy_coef * reduce(H) + kl_loss_coef * reduce(KL to the reference).

    `log_probs` and `entropies` are the current model's, [R_i] a sample, with gradient. Metrics, all detached:

    - always: loss, pg_loss, pg_clipfrac, ppo_kl (mean of old - current), ess_ratio
    - entropy_loss where the entropies are computed, kl_loss with --use-kl-loss, opsm_clipfrac with --use-opsm
    - train_rollout_logprob_abs_diff, train_rollout_kl where the engine's log-probabilities are known: the same tokens
      under the same weights should give 0
    - ois (the ratio current / old) and what the TIS function reports (tis, tis_clipfrac, tis_abs) with --use-tis or
      --get-mismatch-metrics

    Raises ValueError naming field, sample and flag where the micro-batch lacks what the flags call for.
    """
    layout = ResponseLayout.of(micro_batch, device=log_probs[0].device)
    current = layout.flatten("log_probs", log_probs, needed_by="the current policy")
    old = _old_log_probs(config, micro_batch, layout)
    advantages = layout.flatten("advantages", micro_batch.get("advantages"), needed_by="--loss-type policy_loss")

    ppo_kl = log_ratio(layout, old, current, by_sequence=config.advantage_estimator == "gspo")
    pg_loss, clipped = clipped_objective(
        ppo_kl, advantages, eps_low=config.eps_clip, eps_high=config.eps_clip_high, dual_clip=config.eps_clip_c
    )
    pg_loss = torch.where(torch.isfinite((old - current).detach()), layout.masked(pg_loss), 0.0)
    per_token: dict[str, torch.Tensor] = {"pg_clipfrac": clipped, "ppo_kl": ppo_kl}

    if config.use_opsm:
        keep = opsm_weights(layout, old, current, advantages, delta=config.opsm_delta)
        pg_loss = pg_loss * keep
        per_token["opsm_clipfrac"] = 1 - keep
    if config.needs_tis:
        weighted, layout, tis_metrics = _apply_tis(config, micro_batch, layout, pg_loss)
        pg_loss = weighted if config.use_tis else pg_loss
        per_token |= {"ois": (-ppo_kl).clamp(-20.0, 20.0).exp(), **tis_metrics}
    per_token |= _train_rollout_difference(micro_batch, layout, current)

    reduce = TokenReducer(layout, per_token=config.calculate_per_token_loss)
    loss = reduced_pg_loss = _reduce_pg_loss(config, micro_batch, layout, pg_loss)
    metrics = {"pg_loss": reduced_pg_loss}
    if config.needs_entropy:
        flat = layout.flatten("entropies", entropies, needed_by="--entropy-coef or --observe-training-entropy")
        metrics["entropy_loss"] = entropy_loss = reduce(flat)
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropy_loss
    if config.use_kl_loss:
        metrics["kl_loss"] = kl_loss = reduce(_reference_kl(config, micro_batch, layout, current, old))
        if config.kl_loss_coef:
            loss = loss + config.kl_loss_coef * kl_loss

    metrics |= {name: reduce(values) for name, values in per_token.items()}
    metrics["ess_ratio"] = effective_sample_size(layout, ppo_kl, per_token=config.calculate_per_token_loss)
    return loss, _detached({"loss": loss, **metrics})


def value_loss(config: LossConfig, micro_batch: Mapping[str, Any], values: Sequence[torch.Tensor]) -> LossAndMetrics:
    """max((V_clipped - R)^2, (V - R)^2), where V_clipped stays within --value-clip of the value before the step.

    `values` are the current critic's, [R_i] a sample. Metrics: value_loss, value_clipfrac.
    """
    layout = ResponseLayout.of(micro_batch, device=values[0].device)
    current = layout.flatten("values", values, needed_by="the value loss")
    old = layout.flatten("values", micro_batch.get("values"), needed_by="the value loss")
    returns = layout.flatten("returns", micro_batch.get("returns"), needed_by="the value loss")
    clipped = old + (current - old).clamp(-config.value_clip, config.value_clip)
    error, clipped_error = (current - returns).square(), (clipped - returns).square()
    reduce = TokenReducer(layout, per_token=config.calculate_per_token_loss)
    loss = reduce(layout.masked(torch.maximum(error, clipped_error)))
    clipfrac = reduce((clipped_error > error).float())
    return loss, _detached({"value_loss": loss, "value_clipfrac": clipfrac})


def sft_loss(config: LossConfig, micro_batch: Mapping[str, Any], log_probs: Sequence[torch.Tensor]) -> LossAndMetrics:
    """Negative log-likelihood of the unmasked response tokens."""
    layout = ResponseLayout.of(micro_batch, device=log_probs[0].device)
    current = layout.flatten("log_probs", log_probs, needed_by="--loss-type sft_loss")
    loss = -TokenReducer(layout, per_token=config.calculate_per_token_loss)(current)
    return loss, _detached({"loss": loss})


def _custom_loss(config: LossConfig, micro_batch: Mapping[str, Any], logits: torch.Tensor) -> LossAndMetrics:
    """Call the user's `f(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)`."""
    assert config.custom_loss_function is not None
    reduce = TokenReducer(
        ResponseLayout.of(micro_batch, device=logits.device), per_token=config.calculate_per_token_loss
    )
    with UserCode("loss function", config.custom_loss_function, "a micro batch"):
        loss, metrics = config.custom_loss_function(config.args, micro_batch, logits, reduce)
    return loss, _detached({"loss": loss, **metrics})


def _old_log_probs(config: LossConfig, micro_batch: Mapping[str, Any], layout: ResponseLayout) -> torch.Tensor:
    if config.use_rollout_logprobs:
        name, needed_by = "rollout_log_probs", "--use-rollout-logprobs"
    else:
        name, needed_by = "log_probs", "--loss-type policy_loss"
    return layout.flatten(name, micro_batch.get(name), needed_by=needed_by).detach()


def _apply_tis(
    config: LossConfig, micro_batch: Mapping[str, Any], layout: ResponseLayout, pg_loss: torch.Tensor
) -> tuple[torch.Tensor, ResponseLayout, dict[str, torch.Tensor]]:
    """Weighted loss, the layout with the masks that the TIS function returns, and its metrics as [N]."""
    flag = "--use-tis" if config.use_tis else "--get-mismatch-metrics"
    train = layout.flatten("log_probs", micro_batch.get("log_probs"), needed_by=flag).detach()
    rollout = layout.flatten("rollout_log_probs", micro_batch.get("rollout_log_probs"), needed_by=flag).detach()
    weighted, masks, metrics = config.tis_function(
        args=config.args if config.args is not None else config,
        pg_loss=pg_loss,
        train_log_probs=layout.split(train),
        rollout_log_probs=layout.split(rollout),
        loss_masks=layout.split(layout.mask),
        total_lengths=micro_batch.get("total_lengths"),
        response_lengths=list(layout.lengths),
        parallel_state=micro_batch.get("parallel_state"),
        max_seq_lens=micro_batch.get("max_seq_lens"),
    )
    if weighted.shape != pg_loss.shape:
        raise ValueError(
            f"--custom-tis-function-path returned pg_loss of shape {tuple(weighted.shape)}, "
            f"expected {tuple(pg_loss.shape)}"
        )
    if config.use_tis:
        mask = layout.flatten("loss_masks", masks, needed_by="--custom-tis-function-path").detach()
        layout = replace(layout, mask=mask)
    return weighted, layout, {name: _per_token(layout, value) for name, value in metrics.items()}


def _per_token(layout: ResponseLayout, value: Any) -> torch.Tensor:
    """A metric of a custom function as [N]; a single number counts for every token."""
    tensor = torch.as_tensor(value, dtype=torch.float32, device=layout.device).detach()
    return tensor.expand(layout.mask.shape) if tensor.numel() == 1 else tensor


def _reduce_pg_loss(
    config: LossConfig, micro_batch: Mapping[str, Any], layout: ResponseLayout, pg_loss: torch.Tensor
) -> torch.Tensor:
    """Build the reducer from the masks as they are now, and reduce."""
    reducer: Callable[[torch.Tensor], torch.Tensor] = config.pg_loss_reducer(
        micro_batch.get("total_lengths"),
        list(layout.lengths),
        layout.split(layout.mask),
        config.calculate_per_token_loss,
    )
    return reducer(pg_loss)


def _reference_kl(
    config: LossConfig,
    micro_batch: Mapping[str, Any],
    layout: ResponseLayout,
    current: torch.Tensor,
    old: torch.Tensor,
) -> torch.Tensor:
    reference = layout.flatten("ref_log_probs", micro_batch.get("ref_log_probs"), needed_by="--use-kl-loss").detach()
    return layout.masked(
        estimate_kl(current, reference, config.kl_loss_type, old_log_probs=old if config.use_unbiased_kl else None)
    )


def _train_rollout_difference(
    micro_batch: Mapping[str, Any], layout: ResponseLayout, current: torch.Tensor
) -> dict[str, torch.Tensor]:
    """|train - rollout| and the k3 estimate of KL(rollout || train), per token; nothing without the engine's numbers.

    The trainer's side is its recomputation before the step, or the current model where there was none.
    """
    if micro_batch.get("rollout_log_probs") is None:
        return {}
    rollout = layout.flatten("rollout_log_probs", micro_batch["rollout_log_probs"], needed_by="the comparison")
    train = current
    if micro_batch.get("log_probs") is not None:
        train = layout.flatten("log_probs", micro_batch["log_probs"], needed_by="the comparison")
    train = train.detach()
    return {
        "train_rollout_logprob_abs_diff": (train - rollout).abs(),
        "train_rollout_kl": estimate_kl(rollout, train, "k3"),
    }


def _detached(metrics: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value).detach() for name, value in metrics.items()}
