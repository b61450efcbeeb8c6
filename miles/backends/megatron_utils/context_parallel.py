"""Sequences shared by context-parallel ranks: which tokens of a packed row each rank has.

With R ranks a sequence is cut into 2R pieces; rank r has pieces r and 2R - 1 - r. So each has as much of the causal
attention to do as any other, and megatron-core's rotary embedding and Transformer Engine's attention expect it:

    row             | 0 1 2 3 4 5 6 7 | 8 9 10 11 |          two sequences, padded to multiples of 2R = 4 tokens
    rank 0 of 2     | 0 1         6 7 | 8      11 |
    rank 1 of 2     |     2 3 4 5     |   9 10    |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from miles.backends.training_utils.log_probs import RowShard

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class ContextShard:
    """What this rank has of a packed row of T tokens, and how the row comes out of the parts of all ranks."""

    positions: torch.Tensor
    """[T / ranks] int64: the places in the row of this rank's tokens, in its order."""
    order: torch.Tensor
    """[T] int64: for each place in the row, its place in the parts of all ranks behind each other."""
    group: Any

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """[T / ranks, ...] of each rank -> [T, ...] on all; differentiable, a collective in both directions."""
        gathered = gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=True, group=self.group)
        return gathered.index_select(0, self.order)

    def rows(self) -> RowShard:
        """Where in this rank's part each token of the row is."""
        local = torch.full_like(self.order, -1)
        local[self.positions] = torch.arange(len(self.positions), device=local.device)
        return RowShard(local, self.group)


def context_shard(lengths: Sequence[int], device: torch.device) -> ContextShard | None:
    """This rank's part of sequences of `lengths` (multiples of twice the number of ranks); None where one rank has all
    of every sequence."""
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return None
    parts = [shard_positions(lengths, rank, ranks) for rank in range(ranks)]
    gathered = torch.cat(parts)
    order = torch.empty_like(gathered)
    order[gathered] = torch.arange(len(gathered))
    own = parts[parallel_state.get_context_parallel_rank()]
    return ContextShard(own.to(device), order.to(device), parallel_state.get_context_parallel_group())


def shard_positions(lengths: Sequence[int], rank: int, ranks: int) -> torch.Tensor:
    """[sum(lengths) / ranks] int64: the places of `rank`'s tokens.

    >>> shard_positions([8, 4], 0, 2).tolist()
    [0, 1, 6, 7, 8, 11]
    """
    pieces = []
    start = 0
    for length in lengths:
        piece, rest = divmod(length, 2 * ranks)
        assert rest == 0, f"a sequence of {length} tokens does not divide among {ranks} ranks"
        for number in (rank, 2 * ranks - 1 - rank):
            pieces.append(torch.arange(start + number * piece, start + (number + 1) * piece))
        start += length
    return torch.cat(pieces)
