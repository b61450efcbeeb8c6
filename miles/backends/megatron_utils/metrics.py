"""The trainer's metrics: sums over samples become means over the optimizer step, over all data-parallel ranks."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from miles.backends.megatron_utils import parallel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PER_TOKEN_MEANS = ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "returns", "values")
_PER_SAMPLE_MEANS = ("rewards", "raw_reward")


class Times:
    """Seconds per named phase, each with the work on the GPU that it has started, and no other phase's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self.seconds[name] = time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def step_means(sums: Mapping[str, float], normalizer: float, device: torch.device) -> dict[str, float]:
    """`train/<name>` of one optimizer step. `sums`: over this rank's samples; a collective."""
    total = torch.tensor([sums[name] for name in sorted(sums)], dtype=torch.float64, device=device)
    values = (parallel.sum_over_data_parallel(total) / normalizer).tolist()
    return {f"train/{name}": value for name, value in zip(sorted(sums), values, strict=True)}


def mean_of_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over the optimizer steps of a rollout."""
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}


def rollout_means(batch: Mapping[str, Any]) -> dict[str, float]:
    """`rollout/<name>`: means over samples (of the masked mean, for numbers per token); a collective."""
    masks = torch.cat(batch["loss_masks"])
    lengths = torch.tensor(batch["response_lengths"], device=masks.device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=masks.device), lengths)
    weight = masks.double() / _per_sample(masks.double(), owner, len(lengths)).clamp(min=1)[owner]
    sums: dict[str, float | torch.Tensor] = {"count": float(len(lengths))}
    for name in _PER_TOKEN_MEANS:
        if name in batch and isinstance(batch[name][0], torch.Tensor):
            sums[f"rollout/{name}"] = (torch.cat(batch[name]).double() * weight).sum()
    for name in _PER_SAMPLE_MEANS:
        if name in batch and all(isinstance(value, int | float) for value in batch[name]):
            sums[f"rollout/{name}"] = float(sum(batch[name]))
    total = parallel.sum_over_data_parallel(
        torch.tensor([float(value) for value in sums.values()], dtype=torch.float64, device=masks.device)
    ).tolist()
    return {name: value / total[0] for name, value in zip(sums, total, strict=True) if name != "count"}


def _per_sample(values: torch.Tensor, owner: torch.Tensor, num_samples: int) -> torch.Tensor:
    return values.new_zeros(num_samples).index_add_(0, owner, values)


def perf(times: Times, *, tokens: float, dp_size: int, total_seconds: float) -> dict[str, float]:
    """`perf/<phase>_time` in seconds on this rank, and the tokens per second and rank of the training phase."""
    return {
        **{f"perf/{name}_time": seconds for name, seconds in times.seconds.items()},
        "perf/actor_train_tok_per_s": tokens / max(times.seconds["actor_train"], 1e-9),
        "perf/train_call_time": total_seconds,
    }
