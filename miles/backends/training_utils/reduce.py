"""From a number per token to the number that is summed over micro-batches and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles.backends.training_utils.response_layout import ResponseLayout

if TYPE_CHECKING:
    from collections.abc import Sequence


class TokenReducer:
    """Callable [N] -> scalar: the sum over samples of the masked mean, or the sum over unmasked tokens.

    per sample:  sum_i  sum_t m_it x_it / max(sum_t m_it, 1)      to be divided by the samples of the step
    per token:   sum_i  sum_t m_it x_it                           to be divided by the tokens of the step
    """

    def __init__(self, layout: ResponseLayout, *, per_token: bool) -> None:
        self._counts = layout.mask > 0
        self._weights = layout.mask if per_token else layout.mask / layout.expand(layout.mask_sums.clamp(min=1))

    def __call__(self, per_token: torch.Tensor) -> torch.Tensor:
        return (torch.where(self._counts, per_token, 0.0) * self._weights).sum()


def sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    masks: Sequence[torch.Tensor],
    per_token: bool = False,
) -> TokenReducer:
    """The standard reducer, with the signature of a --custom-pg-loss-reducer-function-path hook.

    `total_lengths` is not used: it belongs to the signature for hooks that weigh by prompt length.
    """
    return TokenReducer(
        ResponseLayout.of({"response_lengths": response_lengths, "loss_masks": masks}), per_token=per_token
    )
