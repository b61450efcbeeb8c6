"""Packing token lists of different lengths into one row, and the places where each one starts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class PackedBatch:
    """B token lists in one row of T tokens (T includes the padding at the end)."""

    tokens: torch.Tensor
    """[1, T] int64; padding is token 0."""
    position_ids: torch.Tensor
    """[1, T] int64; starts again from 0 with each list and with the padding."""
    cu_seqlens: torch.Tensor
    """[B + 1] int32, or [B + 2] where padding was needed: the padding is a sequence of its own."""
    total_lengths: tuple[int, ...]
    """Length of each list, without padding."""
    max_seqlen: int
    """Length of the longest sequence in `cu_seqlens`, the padding counted as one."""

    def unpack(self) -> list[torch.Tensor]:
        """The token lists again, as views: B tensors [L_i]."""
        row = self.tokens[0, : sum(self.total_lengths)]
        return list(torch.split(row, list(self.total_lengths)))


def pack(
    token_lists: Sequence[Sequence[int] | torch.Tensor],
    pad_multiple: int = 1,
    *,
    device: torch.device | str | None = None,
) -> PackedBatch:
    """Concatenate `token_lists` and pad the row to a multiple of `pad_multiple` tokens.

    Raises ValueError for an empty batch, an empty list, or a `pad_multiple` below 1.
    """
    if not token_lists:
        raise ValueError("cannot pack an empty micro-batch")
    if pad_multiple < 1:
        raise ValueError(f"--data-pad-size-multiplier must be at least 1, got {pad_multiple}")
    lengths = [len(tokens) for tokens in token_lists]
    if 0 in lengths:
        raise ValueError(f"tokens: sample {lengths.index(0)} of the micro-batch is empty")
    padding = -sum(lengths) % pad_multiple
    sequences = [*lengths, padding] if padding else lengths
    rows = [torch.as_tensor(tokens, dtype=torch.int64) for tokens in token_lists]
    if padding:
        rows.append(rows[0].new_zeros(padding))  # where the tokens are: a GPU, with the trainer's
    return PackedBatch(
        tokens=torch.cat(rows).unsqueeze(0).to(device),
        position_ids=torch.cat([torch.arange(length) for length in sequences]).unsqueeze(0).to(device),
        cu_seqlens=torch.tensor([0, *accumulate(sequences)], dtype=torch.int32, device=device),
        total_lengths=tuple(lengths),
        max_seqlen=max(sequences),
    )
