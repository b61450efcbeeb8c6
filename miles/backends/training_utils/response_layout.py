"""The response tokens of a micro-batch in one flat row: where each sample lies, and which tokens count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class ResponseLayout:
    """B samples whose responses have N tokens together. Per-token quantities are flat tensors [N]."""

    lengths: tuple[int, ...]
    """Response length of each sample."""
    names: tuple[Any, ...]
    """What errors call the samples: their index in the data set where the micro-batch has it, else their place."""
    mask: torch.Tensor
    """[N] float32, 1 where a token is trained on."""

    @classmethod
    def of(cls, batch: Mapping[str, Any], *, device: torch.device | str | None = None) -> ResponseLayout:
        """Read `response_lengths`, `loss_masks` and, for error messages, `sample_indices`. Everything that is
        flattened later moves to `device` (None: where the masks are).

        Raises ValueError where a loss mask is missing or does not have its sample's response length.
        """
        lengths = tuple(int(length) for length in batch["response_lengths"])
        names = tuple(batch.get("sample_indices") or range(len(lengths)))
        if len(names) != len(lengths):
            raise ValueError(f"sample_indices: {len(names)} entries for {len(lengths)} samples")
        mask = _flatten("loss_masks", batch.get("loss_masks"), lengths, names, "the loss")
        return cls(lengths=lengths, names=names, mask=mask.detach().to(device))

    @property
    def device(self) -> torch.device:
        return self.mask.device

    def flatten(self, name: str, values: Sequence[Any] | None, *, needed_by: str) -> torch.Tensor:
        """Per-sample lists or tensors [R_i] -> [N] float32 on the mask's device.

        Raises ValueError naming the field `name`, the sample and what needs it, where it is missing or has another
        length than the response.
        """
        return _flatten(name, values, self.lengths, self.names, needed_by).to(self.device)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """[N] -> B tensors [R_i]."""
        return list(torch.split(flat, list(self.lengths)))

    def sum_by_sample(self, flat: torch.Tensor) -> torch.Tensor:
        """[N] -> [B]; added up sample by sample, so the result does not depend on the order of GPU threads."""
        lengths = torch.tensor(self.lengths, device=flat.device)
        return torch.segment_reduce(flat, "sum", lengths=lengths, initial=0)

    def masked_mean_by_sample(self, flat: torch.Tensor) -> torch.Tensor:
        """[N] -> [B]: sum(m * x) / max(sum(m), 1)."""
        return self.sum_by_sample(self.masked(flat)) / self.mask_sums.clamp(min=1)

    def expand(self, per_sample: torch.Tensor) -> torch.Tensor:
        """[B] -> [N]: each sample's number at each of its tokens."""
        lengths = torch.tensor(self.lengths, device=per_sample.device)
        return torch.repeat_interleave(per_sample, lengths, output_size=sum(self.lengths))

    @property
    def mask_sums(self) -> torch.Tensor:
        """[B]: tokens of each sample that are trained on."""
        return self.sum_by_sample(self.mask)

    def masked(self, flat: torch.Tensor) -> torch.Tensor:
        """Zero where a token is not trained on or the value is NaN or infinite; no gradient flows from there."""
        return torch.where((self.mask > 0) & torch.isfinite(flat.detach()), flat, 0.0)


def _flatten(
    name: str, values: Sequence[Any] | None, lengths: Sequence[int], names: Sequence[Any], needed_by: str
) -> torch.Tensor:
    if values is None:
        raise ValueError(f"{needed_by} needs {name!r}, which the batch does not have")
    if len(values) != len(lengths):
        raise ValueError(f"{name}: {len(values)} entries for {len(lengths)} samples")
    tensors = all(type(value) is torch.Tensor and value.dim() == 1 for value in values)
    if tensors and list(map(len, values)) == list(lengths):  # what the trainer passes
        return torch.cat(list(values)).float() if values else torch.zeros(0)
    rows = []
    for value, length, label in zip(values, lengths, names, strict=True):
        if value is None:
            raise ValueError(f"{needed_by} needs {name!r}, which sample {label} does not have")
        row = torch.as_tensor(value, dtype=torch.float32)
        if row.shape != (length,):
            raise ValueError(f"{name}: sample {label} has shape {tuple(row.shape)}, its response has {length} tokens")
        rows.append(row)
    return torch.cat(rows) if rows else torch.zeros(0)
