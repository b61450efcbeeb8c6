"""What the fully-async rollout reads from the flags, once, and the bounds that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace

GRANULARITIES = ("sample", "group")
UNUSED_HANDLERS = ("retry", "drop")
_PROMISED = ("rollout_batch_size", "n_samples_per_prompt", "max_weight_staleness", "async_max_concurrent_samples")


@dataclass(frozen=True)
class FullyAsyncConfig:
    """Sizes and limits of the fully-async rollout. Raises ValueError naming the flag, the rule and the value."""

    rollout_batch_size: int
    """Prompt groups in one training batch."""

    n_samples_per_prompt: int
    """Members of one group."""

    max_weight_staleness: int | None = None
    """Weight versions that a group may lag behind when the trainer starts its step; None means no limit."""

    async_max_concurrent_samples: int | None = None
    """Samples in flight; None means one training batch of groups."""

    async_data_buffer_capacity_factor: float | None = None
    """Finished groups that may wait, in training batches; None means the module's fixed number of groups."""

    async_data_buffer_max_bytes: int | None = None
    """Estimated bytes of the finished groups that may wait; None means no limit."""

    async_unused_samples_handler: str = "retry"
    """What becomes of an aborted or stale group: it starts over, or is dropped."""

    async_max_group_retries: int = 8
    """Times that a group may start over before it is dropped."""

    update_weights_interval: int = 1
    """Training steps between two weight versions."""

    strict_weight_versions: bool = False
    """Whether a sample of unknown version is an error."""

    rollout_submission_granularity: str = "group"
    """Whether a place in generation becomes free with each finished sample, or with the whole group."""

    no_progress_timeout: float | None = None
    """Seconds without a finished group after which a waiting call gives up; None means never."""

    max_empty_batches: int | None = None
    """Batches' worth of groups that may be turned down in a row; None means any number."""

    @classmethod
    def from_args(cls, args: Namespace) -> FullyAsyncConfig:
        if not args.rollout_global_dataset:
            raise ValueError(
                "--fully-async needs the global data set: it takes prompts one group at a time, all the time. "
                "Remove --disable-rollout-global-dataset."
            )
        promised = {name: getattr(args, name) for name in _PROMISED}
        newer = {name: getattr(args, name) for name in cls.__dataclass_fields__ if hasattr(args, name)}
        return cls(**{**promised, **newer})

    def __post_init__(self) -> None:
        self._require("rollout_batch_size", minimum=1)
        self._require("n_samples_per_prompt", minimum=1)
        self._require("max_weight_staleness", minimum=0)
        self._require("async_max_concurrent_samples", minimum=1)
        self._require("async_data_buffer_max_bytes", minimum=1)
        self._require("async_max_group_retries", minimum=0)
        self._require("update_weights_interval", minimum=1)
        self._require("max_empty_batches", minimum=1)
        self._require_above_zero("async_data_buffer_capacity_factor")
        self._require_above_zero("no_progress_timeout")
        self._require_one_of("async_unused_samples_handler", UNUSED_HANDLERS)
        self._require_one_of("rollout_submission_granularity", GRANULARITIES)

    def _require(self, name: str, *, minimum: int) -> None:
        value = getattr(self, name)
        if value is not None and value < minimum:
            raise ValueError(f"{_flag(name)} must be at least {minimum}, got {value}")

    def _require_above_zero(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not value > 0:
            raise ValueError(f"{_flag(name)} must be above 0, got {value}")

    def _require_one_of(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{_flag(name)} must be one of {', '.join(choices)}, got {value!r}")

    @property
    def by_sample(self) -> bool:
        return self.rollout_submission_granularity == "sample"

    @property
    def max_in_flight_groups(self) -> int:
        """Groups in generation at once: `max(1, async_max_concurrent_samples // n_samples_per_prompt)`, or
        `rollout_batch_size` where that flag is not set."""
        if self.async_max_concurrent_samples is None:
            return self.rollout_batch_size
        return max(1, self.async_max_concurrent_samples // self.n_samples_per_prompt)

    @property
    def max_in_flight_samples(self) -> int:
        """Samples in generation at once: by group, those of `max_in_flight_groups`; by sample,
        `async_max_concurrent_samples`, but at least one group's."""
        if self.by_sample and self.async_max_concurrent_samples is not None:
            return max(self.n_samples_per_prompt, self.async_max_concurrent_samples)
        return self.max_in_flight_groups * self.n_samples_per_prompt

    @property
    def most_groups_in_flight(self) -> int:
        """By group `max_in_flight_groups`.

        By sample, a group may be down to its last sample when the next one starts, for which a whole group's places
        must be free: `max_in_flight_samples - n_samples_per_prompt + 1` groups may be generating, and
        `max_in_flight_groups` more may hold no place any more, because they are being rewarded or wait for room.
        """
        if self.by_sample:
            return self.max_in_flight_samples - self.n_samples_per_prompt + 1 + self.max_in_flight_groups
        return self.max_in_flight_groups

    def queue_capacity(self, default: int) -> int:
        """Finished groups that may wait for the trainer: `max(1, int(factor * rollout_batch_size))`, or `default`."""
        if self.async_data_buffer_capacity_factor is None:
            return default
        return max(1, int(self.async_data_buffer_capacity_factor * self.rollout_batch_size))

    def staleness_bound(self, queue_capacity: int) -> int:
        """How many versions may pass from a group's first token to its training step, if no group overtakes it.

        At most F = `most_groups_in_flight` groups, it included, and Q = `queue_capacity` finished ones are before the
        trainer, which takes B a step and publishes weights every k steps: ceil(F + Q, in units of k * B) versions. A
        limit bounds it from above.
        """
        unbounded = math.ceil(
            (self.most_groups_in_flight + queue_capacity) / (self.rollout_batch_size * self.update_weights_interval)
        )
        return unbounded if self.max_weight_staleness is None else min(unbounded, self.max_weight_staleness)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
