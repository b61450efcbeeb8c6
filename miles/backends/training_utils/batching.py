"""Cutting the samples of one optimizer step into micro-batches.

samples of one step and rank --fixed size----------------> consecutive slices
                             \\--token limit (dynamic)----> first-fit count -> max over ranks -> balanced parts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.backends.training_utils.balance import balanced_partition
from miles.backends.training_utils.packing import PackedBatch, pack

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

__all__ = ["MicroBatchConfig", "PackedBatch", "first_fit", "micro_batch_indices", "optimizer_steps", "pack"]


@dataclass(frozen=True)
class MicroBatchConfig:
    """How many samples, or tokens, go through the model at once."""

    micro_batch_size: int
    """Samples in a micro-batch; not used with `use_dynamic_batch_size`."""
    use_dynamic_batch_size: bool
    max_tokens_per_gpu: int | None
    """Tokens in a micro-batch on one GPU; a longer sample goes alone. Needed with `use_dynamic_batch_size`."""

    def __post_init__(self) -> None:
        if self.use_dynamic_batch_size and not self.max_tokens_per_gpu:
            raise ValueError("--use-dynamic-batch-size needs --max-tokens-per-gpu (a positive number of tokens)")
        if self.max_tokens_per_gpu is not None and self.max_tokens_per_gpu < 1:
            raise ValueError(f"--max-tokens-per-gpu must be at least 1, got {self.max_tokens_per_gpu}")
        if self.micro_batch_size < 1:
            raise ValueError(f"--micro-batch-size must be at least 1, got {self.micro_batch_size}")

    @classmethod
    def from_args(cls, args: Namespace, *, forward_only: bool = False) -> MicroBatchConfig:
        """`forward_only` prefers --log-probs-max-tokens-per-gpu: a pass without gradients has room for more tokens."""
        max_tokens = getattr(args, "max_tokens_per_gpu", None)
        if forward_only:
            max_tokens = getattr(args, "log_probs_max_tokens_per_gpu", None) or max_tokens
        return cls(
            micro_batch_size=getattr(args, "micro_batch_size", 1),
            use_dynamic_batch_size=getattr(args, "use_dynamic_batch_size", False),
            max_tokens_per_gpu=max_tokens,
        )


def optimizer_steps(num_samples: int, global_batch_size: int, dp_size: int) -> list[range]:
    """The samples of one rank (`num_samples` of them), cut into optimizer steps of `global_batch_size // dp_size`.

    Raises ValueError where `global_batch_size` samples cannot be spread evenly, or a step would be incomplete.
    """
    if global_batch_size < 1 or global_batch_size % dp_size:
        raise ValueError(
            f"--global-batch-size must be a positive multiple of the data-parallel size {dp_size}, "
            f"got {global_batch_size}"
        )
    per_step = global_batch_size // dp_size
    if num_samples % per_step:
        raise ValueError(
            f"--global-batch-size {global_batch_size}: {num_samples} samples per rank are no whole number of steps of "
            f"{per_step}"
        )
    return [range(start, start + per_step) for start in range(0, num_samples, per_step)]


def micro_batch_indices(
    args: Namespace,
    total_lengths: Sequence[int],
    *,
    cp_size: int = 1,
    multiple_of: int = 1,
    forward_only: bool = False,
    max_over_dp: Callable[[int], int] | None = None,
) -> list[list[int]]:
    """Cut the samples of one optimizer step on this rank into micro-batches; each index is in exactly one.

    `total_lengths` holds prompt + response tokens of each sample. Every data-parallel rank must run the same number
    of micro-batches: `max_over_dp` takes this rank's count and returns the largest over the ranks (a collective; None
    for one rank; only called with --use-dynamic-batch-size). `multiple_of` is the group size of an interleaved
    pipeline: the count is rounded up to a multiple of it, by splitting some. `forward_only` uses
    --log-probs-max-tokens-per-gpu.

    With a fixed --micro-batch-size the last micro-batch may be smaller.
    """
    config = MicroBatchConfig.from_args(args, forward_only=forward_only)
    n = len(total_lengths)
    if n == 0:
        raise ValueError("cannot cut an empty list of samples into micro-batches")
    if not config.use_dynamic_batch_size:
        size = config.micro_batch_size
        parts = [list(range(start, min(start + size, n))) for start in range(0, n, size)]
        count = -(-len(parts) // multiple_of) * multiple_of
        if count > n:
            raise ValueError(
                f"--global-batch-size gives this rank {n} samples a step, but an interleaved pipeline needs a multiple "
                f"of {multiple_of} micro-batches (--pipeline-model-parallel-size)"
            )
        return _split_to(parts, count)
    assert config.max_tokens_per_gpu is not None
    max_tokens = config.max_tokens_per_gpu * cp_size
    packed = first_fit(total_lengths, max_tokens)
    count = max_over_dp(len(packed)) if max_over_dp else len(packed)
    count = -(-count // multiple_of) * multiple_of
    if count > n:
        raise ValueError(
            f"--use-dynamic-batch-size: {count} micro-batches are needed, but this rank has only {n} samples in a "
            "step; use a larger --global-batch-size or --max-tokens-per-gpu"
        )
    if count == 1:
        return packed
    balanced = balanced_partition(total_lengths, count)
    if _fits(balanced, total_lengths, max_tokens):
        return balanced
    return _split_to(packed, count)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each sample into the first bin that has room for it, in the order given.

    No bin exceeds `capacity`, except one that holds a single sample longer than that.

    >>> first_fit([3, 4, 2, 5], 6)
    [[0, 2], [1], [3]]
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for index, length in enumerate(lengths):
        place = next((b for b, room in enumerate(free) if length <= room), None)
        if place is None:
            bins.append([index])
            free.append(capacity - length)
        else:
            bins[place].append(index)
            free[place] -= length
    return bins


def _fits(parts: list[list[int]], lengths: Sequence[int], capacity: int) -> bool:
    return all(len(part) == 1 or sum(lengths[i] for i in part) <= capacity for part in parts)


def _split_to(bins: list[list[int]], count: int) -> list[list[int]]:
    """Split the bins with the most samples until there are `count`; a part of a bin fits where the bin did."""
    bins = [list(members) for members in bins]
    while len(bins) < count:
        fullest = max(bins, key=len)
        half = len(fullest) // 2
        bins.append(fullest[half:])
        del fullest[half:]
    return bins
