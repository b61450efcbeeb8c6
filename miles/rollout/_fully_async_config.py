"""What the fully-async rollout reads from the flags, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace


@dataclass(frozen=True)
class FullyAsyncConfig:
    """Sizes and limits of the fully-async rollout. Raises ValueError naming the flag, the rule and the value."""

    rollout_batch_size: int
    """Prompt groups in one training batch."""

    n_samples_per_prompt: int
    """Members of one group."""

    max_weight_staleness: int | None
    """Weight versions that a group may lag behind when it is drained; None means no limit."""

    async_max_concurrent_samples: int | None
    """Samples in flight; None means one training batch of groups."""

    async_data_buffer_capacity_factor: float | None
    """Finished groups that may wait, in training batches; None means the module's fixed number of groups."""

    @classmethod
    def from_args(cls, args: Namespace) -> FullyAsyncConfig:
        if not args.rollout_global_dataset:
            raise ValueError(
                "--fully-async needs the global data set: it takes prompts one group at a time, all the time. "
                "Remove --disable-rollout-global-dataset."
            )
        return cls(
            rollout_batch_size=args.rollout_batch_size,
            n_samples_per_prompt=args.n_samples_per_prompt,
            max_weight_staleness=args.max_weight_staleness,
            async_max_concurrent_samples=args.async_max_concurrent_samples,
            async_data_buffer_capacity_factor=getattr(args, "async_data_buffer_capacity_factor", None),
        )

    def __post_init__(self) -> None:
        self._require("rollout_batch_size", minimum=1)
        self._require("n_samples_per_prompt", minimum=1)
        self._require("max_weight_staleness", minimum=0)
        self._require("async_max_concurrent_samples", minimum=1)
        factor = self.async_data_buffer_capacity_factor
        if factor is not None and not factor > 0:
            raise ValueError(f"--async-data-buffer-capacity-factor must be above 0, got {factor}")

    def _require(self, name: str, *, minimum: int) -> None:
        value = getattr(self, name)
        if value is not None and value < minimum:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}")

    @property
    def max_in_flight_groups(self) -> int:
        """Groups in generation at once: `max(1, async_max_concurrent_samples // n_samples_per_prompt)`, or
        `rollout_batch_size` where that flag is not set."""
        if self.async_max_concurrent_samples is None:
            return self.rollout_batch_size
        return max(1, self.async_max_concurrent_samples // self.n_samples_per_prompt)

    def queue_capacity(self, default: int) -> int:
        """Finished groups that may wait for the trainer: `max(1, int(factor * rollout_batch_size))`, or `default`."""
        if self.async_data_buffer_capacity_factor is None:
            return default
        return max(1, int(self.async_data_buffer_capacity_factor * self.rollout_batch_size))
