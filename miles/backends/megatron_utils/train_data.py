"""One rank's share of a rollout, as tensors, cut into optimizer steps and micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from miles.backends.megatron_utils.attention import PackedBatchParams, packed_params
from miles.backends.training_utils.packing import PackedBatch, pack

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

_PER_TOKEN_FIELDS = (
    "loss_masks",
    "rollout_log_probs",
    "teacher_log_probs",
    "opd_reverse_kl",
    "values",
    "ref_log_probs",
)
"""Shard fields with one number per response token; those present become lists of float32 tensors [R_i]."""


def batch_from_shard(shard: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The shard's per-sample lists with tensors where the losses want them: the batch that a rollout trains on.

    `tokens` become int64 tensors [L_i], per-token fields float32 tensors [R_i]; everything else stays as it is.
    Converting a field as one flat tensor costs a thousandth of converting each sample.

    Raises:
        ValueError: a field whose length is not the number of samples, or a sample of the wrong length.
    """
    tokens = shard["tokens"]
    if not tokens:
        raise ValueError("the rollout has no samples to train on")
    total_lengths = [len(t) for t in tokens]
    response_lengths = [int(n) for n in shard["response_lengths"]]
    batch = {key: value for key, value in shard.items() if isinstance(value, list) and len(value) == len(tokens)}
    batch["tokens"] = _split(tokens, total_lengths, "tokens", torch.int64, device)
    batch["total_lengths"] = total_lengths
    batch["response_lengths"] = response_lengths
    for name in _PER_TOKEN_FIELDS:
        values = shard.get(name)
        if values is not None and not any(v is None for v in values):
            batch[name] = _split(values, response_lengths, name, torch.float32, device)
    return batch


def _split(
    rows: Sequence[Any], lengths: Sequence[int], name: str, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    if len(rows) != len(lengths):
        raise ValueError(f"{name}: {len(rows)} entries for {len(lengths)} samples")
    wrong = next((i for i, (row, n) in enumerate(zip(rows, lengths, strict=True)) if len(row) != n), None)
    if wrong is not None:
        raise ValueError(
            f"{name}: sample {wrong} of the shard has {len(rows[wrong])} entries, expected {lengths[wrong]}"
        )
    if isinstance(rows[0], torch.Tensor):
        flat = torch.cat([torch.as_tensor(row, dtype=dtype) for row in rows])
    else:
        flat = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return list(flat.to(device).split(list(lengths)))


def select(batch: dict[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """The samples at `indices` of a batch, in this order."""
    return {key: [values[i] for i in indices] for key, values in batch.items()}


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model together: the losses' view, and the packed row that the model sees."""

    samples: dict[str, Any]
    row: PackedBatch
    params: PackedBatchParams


def micro_batch(batch: dict[str, Any], indices: Sequence[int], *, pad_multiple: int, with_layout: bool) -> MicroBatch:
    """Pack the samples at `indices`; `with_layout` prepares the local spec's attention."""
    samples = select(batch, indices)
    row = pack(samples["tokens"], pad_multiple, device=samples["tokens"][0].device)
    lengths = list(row.total_lengths)
    padding = row.tokens.shape[1] - sum(lengths)
    if padding:
        lengths.append(padding)
    return MicroBatch(samples, row, packed_params(row.cu_seqlens, lengths, with_layout=with_layout))


def pad_multiple(args: Namespace, *, on_gpu: bool, ranks: int) -> int:
    """Rows are padded to a multiple of this: `--data-pad-size-multiplier` on a GPU, where kernels want it; no more than
    `ranks`, which share a row (sequence parallelism), on a CPU, where padding is only work."""
    kernels = (getattr(args, "data_pad_size_multiplier", None) or 128) if on_gpu else 1
    return math.lcm(kernels, ranks)
