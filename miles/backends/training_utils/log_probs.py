"""Log-probabilities and entropies of the response tokens of a packed row.

packed row      | p p p r r | p r r r | pad |        logits[t] is the distribution of token t + 1
rows that count |     ^ ^   | ^ ^ ^   |     |        response_length rows a sample, from its last prompt token on
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_CHUNK_ELEMENTS = {"cpu": 1 << 20}
"""Logits that are worked on at once: on a CPU few enough for its cache (4 MiB a float32 temporary)."""
_DEFAULT_CHUNK_ELEMENTS = 1 << 25
"""Elsewhere enough to keep a GPU busy; bounds the temporary memory (128 MiB a float32 temporary)."""
_LOG_ZERO = -1e4
"""Stands for log 0, whose exponential is 0 in float32: a masked vocabulary entry (logit -inf) must not give NaN."""


def response_log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Log-probability of each response token, and the entropy of its distribution, in nats, as float32.

    `logits` is [T, V] or [1, T, V], `tokens` [T] or [1, T]; sample i takes the next `total_lengths[i]` tokens, of
    which the last `response_lengths[i]` are its response; padding behind the last sample is ignored. Returns lists of
    [R_i] tensors; the second is None without `with_entropy`. Both are differentiable with respect to `logits`.

    The logits are divided by `temperature` where it is positive and not 1. Besides the logits themselves nothing of
    size [T, V] is kept for the backward pass, which allocates exactly the gradient.

    Raises ValueError where a sample has no prompt token or the lengths do not fit into the row.
    """
    logits = logits.reshape(-1, logits.shape[-1])
    tokens = tokens.reshape(-1)
    positions = _predicted_positions(total_lengths, response_lengths, logits.shape[0], tokens.shape[0])
    targets = torch.tensor(positions, dtype=torch.int64).to(logits.device)
    divisor = temperature if temperature > 0 else 1.0
    log_probs, entropies = _TokenLogProbs.apply(logits, targets - 1, tokens[targets], divisor, with_entropy)  # type: ignore[no-untyped-call]
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
    total_lengths: Sequence[int], response_lengths: Sequence[int], num_logits: int, num_tokens: int
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
        end += total
        if not 0 <= response < total:
            raise ValueError(
                f"response_lengths: sample {i} of the micro-batch has a response of {response} in {total} tokens; "
                "a sample needs at least one prompt token"
            )
        positions.extend(range(end - response, end))
    return positions


class _TokenLogProbs(torch.autograd.Function):
    """log softmax(logits[row] / divisor)[target] and the entropy of that distribution, row by row.

    With z = logits / divisor, p = softmax(z), H the entropy:
    d log p_target / dz_j = [j = target] - p_j   and   dH / dz_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, divisor: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = torch.empty(rows.shape[0], dtype=torch.float32, device=logits.device)
        log_norms = torch.empty_like(log_probs)
        entropies = torch.empty_like(log_probs) if with_entropy else log_probs.new_empty(0)
        for chunk in _chunks(rows.shape[0], logits):
            scaled = _scaled_rows(logits, rows[chunk], divisor)
            log_norms[chunk] = torch.logsumexp(scaled, dim=-1)
            log_probs[chunk] = scaled.gather(1, targets[chunk, None]).squeeze(1) - log_norms[chunk]
            if with_entropy:
                log_p = scaled.sub_(log_norms[chunk, None])
                entropies[chunk] = -(log_p.exp() * log_p.clamp(min=_LOG_ZERO)).sum(dim=-1)
        ctx.save_for_backward(logits, rows, targets, log_norms, entropies)
        ctx.divisor = divisor
        ctx.with_entropy = with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor, grad_entropies: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        logits, rows, targets, log_norms, entropies = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for chunk in _chunks(rows.shape[0], logits):
            log_p = _scaled_rows(logits, rows[chunk], ctx.divisor).sub_(log_norms[chunk, None])
            weight = -grad_log_probs[chunk, None]
            if ctx.with_entropy:
                log_p.clamp_(min=_LOG_ZERO)
                weight = weight - grad_entropies[chunk, None] * (log_p + entropies[chunk, None])
            rows_grad = log_p.exp_().mul_(weight)
            rows_grad.scatter_add_(1, targets[chunk, None], grad_log_probs[chunk, None])
            grad[rows[chunk]] = rows_grad.div_(ctx.divisor).to(grad.dtype)
        return grad, None, None, None, None


def _scaled_rows(logits: torch.Tensor, rows: torch.Tensor, divisor: float) -> torch.Tensor:
    """A float32 copy of some rows of the logits, divided; the caller may overwrite it."""
    scaled = logits[rows].float()
    return scaled.div_(divisor) if divisor != 1.0 else scaled


def _chunks(num_rows: int, logits: torch.Tensor) -> list[slice]:
    elements = _CHUNK_ELEMENTS.get(logits.device.type, _DEFAULT_CHUNK_ELEMENTS)
    step = max(1, elements // logits.shape[1])
    return [slice(start, start + step) for start in range(0, num_rows, step)]
