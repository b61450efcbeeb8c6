"""Runs micro-batches through the model with megatron-core's schedules: log-probabilities, and one optimizer step's
gradients.

    micro-batches -> schedule (forward, loss, backward; pipelined or not) -> sums over samples of loss and metrics
                                         |
                                         +-> gradients accumulate, reduced over data-parallel ranks behind the last
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from miles.backends.megatron_utils.model import unwrap
from miles.backends.megatron_utils.parallel import from_last_stage, is_last_stage, object_from_last_stage
from miles.backends.training_utils.log_probs import VocabularyShard, response_log_probs
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
    stages: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], *, vocab_size: int, temperature: float
) -> list[list[torch.Tensor]]:
    """Log-probabilities of the response tokens: per micro-batch a list of [R_i] tensors, equal on all ranks that have
    the same samples."""

    def collect(batch: MicroBatch, output: torch.Tensor, non_loss_data: bool = True) -> list[torch.Tensor]:
        logits, shard = _own_vocabulary(output, vocab_size)
        log_probs, _ = response_log_probs(
            logits,
            batch.row.tokens,
            batch.samples["total_lengths"],
            batch.samples["response_lengths"],
            temperature=temperature,
            shard=shard,
            **batch.split,
        )
        return log_probs

    for stage in stages:
        stage.eval()
    with torch.no_grad():
        outputs: list[list[torch.Tensor]] = _run(stages, micro_batches, collect, forward_only=True)
    return _on_all_stages(micro_batches, outputs)


def training_pass(
    stages: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss_config: LossConfig,
    scale: StepScale,
    *,
    vocab_size: int,
    reuse_forward: bool,
) -> dict[str, float]:
    """Accumulate the gradients of one optimizer step; returns the metrics as sums over this rank's samples.

    `reuse_forward`: this is the only step made of the rollout, so the policy before the step is the policy in this
    very forward pass; its detached log-probabilities are the old ones, and a pass of their own would compute the same
    numbers again. They are stored into the micro-batches as `log_probs`.
    """
    factor = scale.loss_factor(len(micro_batches))
    whole_logits = loss_config.loss_type == "custom_loss"

    def loss(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits, shard = (_vocabulary if whole_logits else _own_vocabulary)(output, vocab_size)
        compute = _loss_with_own_log_probs if reuse_forward else loss_from_logits
        total, metrics = compute(loss_config, batch.samples, logits, batch.row.tokens, shard=shard, **batch.split)
        return total * factor, metrics

    for stage in stages:
        stage.train()
    metrics: list[dict[str, torch.Tensor]] = _run(stages, micro_batches, loss, forward_only=False)
    if reuse_forward:
        own = [batch.samples["log_probs"] for batch in micro_batches] if is_last_stage() else []
        for batch, log_probs in zip(micro_batches, _on_all_stages(micro_batches, own), strict=True):
            batch.samples["log_probs"] = log_probs
    sums: dict[str, float] = object_from_last_stage(_sums(metrics))
    return sums


def _loss_with_own_log_probs(
    config: LossConfig,
    samples: dict[str, Any],
    logits: torch.Tensor,
    tokens: torch.Tensor,
    **split: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The policy loss where the current log-probabilities are also the ones before the step."""
    log_probs, entropies = response_log_probs(
        logits,
        tokens,
        samples["total_lengths"],
        samples["response_lengths"],
        temperature=config.temperature,
        with_entropy=config.needs_entropy,
        **split,
    )
    samples["log_probs"] = [row.detach() for row in log_probs]
    return policy_loss(config, samples, log_probs, entropies)


# --- the vocabulary, split over tensor-parallel ranks ----------------------------------------------------------------


def _own_vocabulary(output: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, VocabularyShard | None]:
    """[1, T, rows of this rank] -> [T, real tokens among them], and where in the vocabulary they are."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return output[0, :, :vocab_size], None
    start = parallel_state.get_tensor_model_parallel_rank() * output.shape[-1]
    shard = VocabularyShard(start, parallel_state.get_tensor_model_parallel_group())
    return output[0, :, : max(0, vocab_size - start)], shard


def _vocabulary(output: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, None]:
    """The logits of the whole vocabulary, [T, V], gathered for a user's loss function."""
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(output)
    return whole[0, :, :vocab_size].float(), None


# --- the pipeline ----------------------------------------------------------------------------------------------------


def _run(
    stages: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], on_logits: Any, *, forward_only: bool
) -> list[Any]:
    """What `on_logits` returns for each micro-batch, on the last stage; nothing on the others."""

    config = get_model_config(stages[0])
    # bf16 logits are turned into fp32 some rows at a time, where they are used.
    options: dict[str, Any] = {"fp32_output": False} if config.bf16 else {}
    balances = not forward_only and bool(config.num_moe_experts and config.moe_aux_loss_coeff)

    def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        padding = {"padding_mask": _padding_mask(batch, model, config)} if balances else {}
        output = model(*batch.model_inputs, None, packed_seq_params=batch.params, **options, **padding)
        return output, partial(on_logits, batch)

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in stages],
        model=list(stages),
        num_microbatches=len(micro_batches),
        seq_length=max(batch.row.tokens.shape[1] for batch in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def _padding_mask(batch: MicroBatch, model: torch.nn.Module, config: Any) -> torch.Tensor:
    """What routers leave out of the load-balancing loss, so that it does not depend on how rows are padded: true for
    padding, unlike megatron-core's docstrings say. The first stage splits it for sequence parallelism, the others do
    not."""
    if config.sequence_parallel and not unwrap(model).pre_process:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        return batch.is_padding.chunk(ranks, dim=1)[parallel_state.get_tensor_model_parallel_rank()].contiguous()
    return batch.is_padding


def _on_all_stages(
    micro_batches: Sequence[MicroBatch], per_token: Sequence[Sequence[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Numbers per response token that the last stage has, on all stages."""
    lengths = [list(batch.samples["response_lengths"]) for batch in micro_batches]
    if is_last_stage():
        flat = torch.cat([row for part in per_token for row in part])
    else:
        flat = torch.empty(sum(map(sum, lengths)), dtype=torch.float32, device=micro_batches[0].row.tokens.device)
    rows = from_last_stage(flat).split([length for part in lengths for length in part])
    places = list(accumulate(map(len, lengths), initial=0))
    return [list(rows[start:end]) for start, end in pairwise(places)]


def _sums(metrics: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
    """The metrics of all micro-batches added up, in one transfer from the device."""
    if not metrics:
        return {}
    names = sorted(metrics[0])
    total = torch.stack([torch.stack([part[name].double() for name in names]) for part in metrics]).sum(0)
    return dict(zip(names, total.tolist(), strict=True))
