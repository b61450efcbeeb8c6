"""One rank's share of a rollout, as tensors, cut into optimizer steps and micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

from miles.backends.megatron_utils.attention import PackedBatchParams, packed_params
from miles.backends.megatron_utils.context_parallel import context_shard
from miles.backends.training_utils.packing import PackedBatch, pack

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from miles.backends.megatron_utils.layout import ParallelLayout

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
    """All tokens; with context parallelism this rank's model sees `own` of them."""
    params: PackedBatchParams
    own: torch.Tensor | None
    """[T / ranks] int64: the places of this rank's tokens in the row; None: all."""

    @property
    def model_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and position ids of this rank, [1, T / ranks] each."""
        if self.own is None:
            return self.row.tokens, self.row.position_ids
        return self.row.tokens[:, self.own], self.row.position_ids[:, self.own]

    @property
    def is_padding(self) -> torch.Tensor:
        """[1, T / ranks] bool: which of this rank's tokens belong to no sample. Computed when asked for."""
        padded = self.row.cu_seqlens.diff()  # the last sequence may be nothing but padding
        real = torch.tensor([*self.samples["total_lengths"], 0][: len(padded)], device=padded.device)
        whole = self.row.position_ids >= real.repeat_interleave(padded, output_size=self.row.tokens.shape[1])
        return whole if self.own is None else whole[:, self.own]

    @property
    def split(self) -> dict[str, Any]:
        """How the row is split over context-parallel ranks, for `response_log_probs`."""
        context = self.params.context
        if context is None:
            return {}
        starts = self.row.cu_seqlens[: len(self.samples["tokens"])].tolist()
        return {"rows": context.rows(), "starts": starts}


def micro_batch(batch: dict[str, Any], indices: Sequence[int], *, pad_multiple: int, with_layout: bool) -> MicroBatch:
    """Pack the samples at `indices`; `with_layout` prepares the local spec's attention.

    With context parallelism every sample is padded so that its pieces are equal; no token sees the padding behind it.
    """
    samples = select(batch, indices)
    ranks = parallel_state.get_context_parallel_world_size()
    tokens = samples["tokens"]
    if ranks > 1:
        tokens = [torch.nn.functional.pad(sample, (0, -len(sample) % (2 * ranks))) for sample in tokens]
    row = pack(tokens, pad_multiple, device=samples["tokens"][0].device)
    lengths = list(row.total_lengths)
    padding = row.tokens.shape[1] - sum(lengths)
    if padding:
        lengths.append(padding)
    context = context_shard(lengths, row.tokens.device)
    params = packed_params(row.cu_seqlens, lengths, with_layout=with_layout, context=context)
    return MicroBatch(samples, row, params, None if context is None else context.positions)


def pad_multiple(args: Namespace, layout: ParallelLayout, *, on_gpu: bool) -> int:
    """Rows are padded to a multiple of this: `--data-pad-size-multiplier` on a GPU, where kernels want it; on a CPU,
    where padding is only work, what the ranks that share a row need to get equal parts of it."""
    kernels = (getattr(args, "data_pad_size_multiplier", None) or 128) if on_gpu else 1
    context = 2 * layout.context if layout.context > 1 else 1
    return math.lcm(kernels, context * (layout.tensor if layout.sequence_parallel else 1))
