"""Log-probabilities and entropies of the response tokens of a packed row.

packed row      | p p p r r | p r r r | pad |        logits[t] is the distribution of token t + 1
rows that count |     ^ ^   | ^ ^ ^   |     |        response_length rows a sample, from its last prompt token on

Tensor-parallel ranks each have the logits of a part of the vocabulary (`VocabularyShard`). They exchange three numbers
a token and never the logits: the largest logit, the sum of exponentials with the target's logit, and the entropy's sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

_CHUNK_ELEMENTS = {"cpu": 1 << 20}
"""Logits that are worked on at once: on a CPU few enough for its cache (4 MiB a float32 temporary)."""
_DEFAULT_CHUNK_ELEMENTS = 1 << 25
"""Elsewhere enough to keep a GPU busy; bounds the temporary memory (128 MiB a float32 temporary)."""
_LOG_ZERO = -1e4
"""Stands for log 0, whose exponential is 0 in float32: a masked vocabulary entry (logit -inf) must not give NaN."""


@dataclass(frozen=True)
class VocabularyShard:
    """The columns of the logits that this rank has, and the ranks that have the others."""

    start: int
    """The token of the first column."""
    group: dist.ProcessGroup
    """All ranks of the vocabulary; each computes the same results."""


@dataclass(frozen=True)
class RowShard:
    """The rows of the logits that this rank has, and the ranks that have the others (context parallelism)."""

    local: torch.Tensor
    """[T] int64: for each token of the packed row its row in this rank's logits; -1: another rank has it."""
    group: dist.ProcessGroup

    def whole(self, here: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[N] of all ranks from the numbers of this one; `here` [N] says which they are. Differentiable: each rank
        takes the gradient of its own."""
        own = torch.zeros(here.shape, dtype=values.dtype, device=values.device).masked_scatter(here, values)
        return _SumOverRanks.apply(own, self.group)  # type: ignore[no-any-return, no-untyped-call]


def response_log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    shard: VocabularyShard | None = None,
    rows: RowShard | None = None,
    starts: Sequence[int] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Log-probability of each response token, and the entropy of its distribution, in nats, as float32.

    `logits` is [T, V] or [1, T, V], `tokens` [T] or [1, T]; sample i takes the next `total_lengths[i]` tokens, of
    which the last `response_lengths[i]` are its response; padding behind the last sample is ignored. Returns lists of
    [R_i] tensors; the second is None without `with_entropy`. Both are differentiable with respect to `logits`.

    `shard`: the logits are those of a part of the vocabulary; the call is then a collective of the shard's group.
    `rows`: the logits are those of some tokens of the row; likewise. `starts`: where in the row each sample begins, if
    there is padding between them.

    The logits are divided by `temperature` where it is positive and not 1. Besides the logits themselves nothing of
    size [T, V] is kept for the backward pass, which allocates exactly the gradient.

    Raises ValueError where a sample has no prompt token or the lengths do not fit into the row.
    """
    logits = logits.reshape(-1, logits.shape[-1])
    tokens = tokens.reshape(-1)
    num_rows = logits.shape[0] if rows is None else len(rows.local)
    positions = _predicted_positions(total_lengths, response_lengths, num_rows, tokens.shape[0], starts)
    targets = torch.tensor(positions, dtype=torch.int64).to(logits.device)
    divisor = temperature if temperature > 0 else 1.0
    predicting = targets - 1
    if rows is not None:
        predicting = rows.local[predicting]
        here = predicting >= 0
        predicting, targets = predicting[here], targets[here]
    log_probs, entropies = _TokenLogProbs.apply(logits, predicting, tokens[targets], divisor, with_entropy, shard)  # type: ignore[no-untyped-call]
    if rows is not None:
        log_probs = rows.whole(here, log_probs)
        entropies = rows.whole(here, entropies) if with_entropy else entropies
    lengths = list(response_lengths)
    return list(torch.split(log_probs, lengths)), list(torch.split(entropies, lengths)) if with_entropy else None


def response_values(
    values: torch.Tensor, total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> list[torch.Tensor]:
    """The value head's output for each response token: [T] (or [1, T, 1]) -> lists of [R_i].

    Like the log-probability of a response token, its value is read at the position that predicts it.
    """
    values = values.reshape(-1)
    positions = _predicted_positions(total_lengths, response_lengths, values.shape[0], values.shape[0])
    rows = torch.tensor(positions, dtype=torch.int64).to(values.device) - 1
    return list(torch.split(values[rows].float(), list(response_lengths)))


def _predicted_positions(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    num_logits: int,
    num_tokens: int,
    starts: Sequence[int] | None = None,
) -> list[int]:
    """Positions in the row of all response tokens, sample after sample."""
    if len(total_lengths) != len(response_lengths):
        raise ValueError(f"{len(total_lengths)} total_lengths, but {len(response_lengths)} response_lengths")
    if num_logits != num_tokens:
        raise ValueError(f"{num_logits} rows of logits, but {num_tokens} tokens")
    if sum(total_lengths) > num_tokens:
        raise ValueError(f"total_lengths add up to {sum(total_lengths)}, the row has {num_tokens} tokens")
    positions: list[int] = []
    end = 0
    for i, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        end = total + (end if starts is None else starts[i])
        if not 0 <= response < total:
            raise ValueError(
                f"response_lengths: sample {i} of the micro-batch has a response of {response} in {total} tokens; "
                "a sample needs at least one prompt token"
            )
        positions.extend(range(end - response, end))
    return positions


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks that each go on to compute the same from it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _TokenLogProbs(torch.autograd.Function):
    """log softmax(logits[row] / divisor)[target] and the entropy of that distribution, row by row.

    With z = logits / divisor, p = softmax(z), H the entropy:
    d log p_target / dz_j = [j = target] - p_j   and   dH / dz_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        divisor: float,
        with_entropy: bool,
        shard: VocabularyShard | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns, here = _columns(targets, shard, logits.shape[1])
        target_logits = torch.empty(rows.shape[0], dtype=torch.float32, device=logits.device)
        log_norms = torch.empty_like(target_logits)
        entropies = torch.empty_like(target_logits) if with_entropy else target_logits.new_empty(0)
        for chunk in _chunks(rows.shape[0], logits):
            scaled = _scaled_rows(logits, rows[chunk], divisor)
            log_norms[chunk] = torch.logsumexp(scaled, dim=-1)
            target_logits[chunk] = scaled.gather(1, columns[chunk, None]).squeeze(1)
            if with_entropy and shard is None:
                entropies[chunk] = _entropy(scaled, log_norms[chunk])
        if shard is not None:
            target_logits, log_norms = _combine(torch.where(here, target_logits, 0.0), log_norms, shard)
            if with_entropy:
                for chunk in _chunks(rows.shape[0], logits):
                    entropies[chunk] = _entropy(_scaled_rows(logits, rows[chunk], divisor), log_norms[chunk])
                dist.all_reduce(entropies, group=shard.group)
        ctx.save_for_backward(logits, rows, columns, here, log_norms, entropies)
        ctx.divisor = divisor
        ctx.with_entropy = with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return target_logits - log_norms, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor, grad_entropies: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, rows, columns, here, log_norms, entropies = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        grad_target = grad_log_probs * here
        for chunk in _chunks(rows.shape[0], logits):
            log_p = _scaled_rows(logits, rows[chunk], ctx.divisor).sub_(log_norms[chunk, None])
            weight = -grad_log_probs[chunk, None]
            if ctx.with_entropy:
                log_p.clamp_(min=_LOG_ZERO)
                weight = weight - grad_entropies[chunk, None] * (log_p + entropies[chunk, None])
            rows_grad = log_p.exp_().mul_(weight)
            rows_grad.scatter_add_(1, columns[chunk, None], grad_target[chunk, None])
            grad[rows[chunk]] = rows_grad.div_(ctx.divisor).to(grad.dtype)
        return grad, None, None, None, None, None


def _columns(
    targets: torch.Tensor, shard: VocabularyShard | None, num_columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each target (0 where another rank has it), and whether this rank has it; both [N]."""
    if shard is None:
        return targets, torch.ones_like(targets, dtype=torch.bool)
    columns = targets - shard.start
    here = (columns >= 0) & (columns < num_columns)
    return columns * here, here


def _combine(
    target_logits: torch.Tensor, log_norms: torch.Tensor, shard: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target logits and log-sum-exp of the whole vocabulary from those of each rank's part, [N] each."""
    largest = log_norms.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    sums = torch.stack([target_logits, (log_norms - largest).exp()])
    dist.all_reduce(sums, group=shard.group)
    return sums[0], largest + sums[1].log()


def _entropy(scaled: torch.Tensor, log_norms: torch.Tensor) -> torch.Tensor:
    """-sum(p log p) over the columns of `scaled`, which is overwritten."""
    log_p = scaled.sub_(log_norms[:, None])
    return -(log_p.exp() * log_p.clamp(min=_LOG_ZERO)).sum(dim=-1)


def _scaled_rows(logits: torch.Tensor, rows: torch.Tensor, divisor: float) -> torch.Tensor:
    """A float32 copy of some rows of the logits, divided; the caller may overwrite it."""
    scaled = logits[rows].float()
    return scaled.div_(divisor) if divisor != 1.0 else scaled


def _chunks(num_rows: int, logits: torch.Tensor) -> list[slice]:
    elements = _CHUNK_ELEMENTS.get(logits.device.type, _DEFAULT_CHUNK_ELEMENTS)
    step = max(1, elements // logits.shape[1])
    return [slice(start, start + step) for start in range(0, num_rows, step)]
