"""Zero mean and unit variance over the trained tokens of all data-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    AllReduceSum = Callable[[torch.Tensor], torch.Tensor]


def masked_whiten(
    values: torch.Tensor, mask: torch.Tensor, *, all_reduce_sum: AllReduceSum | None = None, eps: float = 1e-8
) -> torch.Tensor:
    """(x - mean) * rsqrt(var + eps) at every token, with the mean and the Bessel-corrected variance of the tokens
    where `mask` is set. [N], [N] -> [N].

    `all_reduce_sum` adds a tensor up over the data-parallel ranks and returns it (None for a single rank). It is
    called exactly twice, also where this rank has no unmasked token: the variance is taken around the known mean,
    because the difference of two large sums would lose its digits.

    Where fewer than two tokens count in total there is no variance, and the values are returned as they are.
    """
    reduce = all_reduce_sum or (lambda tensor: tensor)
    exact = torch.where(mask > 0, values, 0.0).double()
    weight = (mask > 0).double()
    count, total = reduce(torch.stack([weight.sum(), exact.sum()])).unbind()
    mean = total / count.clamp(min=1)
    squares = reduce((((exact - mean) * weight).square()).sum())
    if count < 2:
        return values
    variance = squares / (count - 1)
    return ((values.double() - mean) * torch.rsqrt(variance + eps)).to(values.dtype)
