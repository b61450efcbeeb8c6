"""Runs micro-batches through the model with megatron-core's schedules: log-probabilities, and one optimizer step's
gradients.

    micro-batches -> schedule (forward, loss, backward; pipelined or not) -> sums over samples of loss and metrics
                                         |
                                         +-> gradients accumulate, reduced over data-parallel ranks behind the last
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from miles.backends.training_utils.log_probs import response_log_probs
from miles.backends.training_utils.loss import loss_from_logits, policy_loss

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miles.backends.megatron_utils.train_data import MicroBatch
    from miles.backends.training_utils.loss import LossConfig


@dataclass(frozen=True)
class StepScale:
    """What turns sums over samples (or tokens) of one rank into the mean over the optimizer step.

    megatron-core divides each micro-batch's loss by the number of micro-batches and the reduced gradients by the number
    of data-parallel ranks; `loss_factor` undoes both, so that the gradient is that of sum / normalizer exactly.
    """

    normalizer: float
    """Samples of the optimizer step over all ranks, or its trained tokens with --calculate-per-token-loss."""
    dp_size: int

    def loss_factor(self, num_micro_batches: int) -> float:
        return num_micro_batches * self.dp_size / self.normalizer


def log_prob_pass(
    model: torch.nn.Module, micro_batches: Sequence[MicroBatch], *, vocab_size: int, temperature: float
) -> list[list[torch.Tensor]]:
    """Log-probabilities of the response tokens: per micro-batch a list of [R_i] tensors. Only on the last stage."""

    def collect(batch: MicroBatch, logits: torch.Tensor, non_loss_data: bool = True) -> list[torch.Tensor]:
        log_probs, _ = response_log_probs(
            logits[0, :, :vocab_size],
            batch.row.tokens,
            batch.samples["total_lengths"],
            batch.samples["response_lengths"],
            temperature=temperature,
        )
        return log_probs

    model.eval()
    with torch.no_grad():
        outputs: list[list[torch.Tensor]] = _run(model, micro_batches, collect, forward_only=True)
    return outputs


def training_pass(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss_config: LossConfig,
    scale: StepScale,
    *,
    vocab_size: int,
    reuse_forward: bool,
) -> list[dict[str, torch.Tensor]]:
    """Accumulate the gradients of one optimizer step; returns each micro-batch's metrics (sums), on the last stage.

    `reuse_forward`: this is the only step made of the rollout, so the policy before the step is the policy in this
    very forward pass; its detached log-probabilities are the old ones, and a pass of their own would compute the same
    numbers again. They are stored into the micro-batches as `log_probs`.
    """
    factor = scale.loss_factor(len(micro_batches))

    def loss(batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        compute = _loss_with_own_log_probs if reuse_forward else loss_from_logits
        total, metrics = compute(loss_config, batch.samples, logits[0, :, :vocab_size], batch.row.tokens)
        return total * factor, metrics

    model.train()
    metrics: list[dict[str, torch.Tensor]] = _run(model, micro_batches, loss, forward_only=False)
    return metrics


def _loss_with_own_log_probs(
    config: LossConfig, samples: dict[str, Any], logits: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The policy loss where the current log-probabilities are also the ones before the step."""
    log_probs, entropies = response_log_probs(
        logits,
        tokens,
        samples["total_lengths"],
        samples["response_lengths"],
        temperature=config.temperature,
        with_entropy=config.needs_entropy,
    )
    samples["log_probs"] = [row.detach() for row in log_probs]
    return policy_loss(config, samples, log_probs, entropies)


def _run(
    model: torch.nn.Module, micro_batches: Sequence[MicroBatch], on_logits: Any, *, forward_only: bool
) -> list[Any]:
    def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        output = model(batch.row.tokens, batch.row.position_ids, None, packed_seq_params=batch.params)
        return output, partial(on_logits, batch)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=len(micro_batches),
        seq_length=max(batch.row.tokens.shape[1] for batch in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
