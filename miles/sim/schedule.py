"""One simulated run, decided in advance: its sizes, its flags and everything that will go wrong in it.

A seed makes a schedule, and a schedule makes a run; nothing else does. Faults name what they hit (a sample, a group, a
step, a moment), so that one can be left out without moving the others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum


class Target(Enum):
    """What a fault hits: `Fault.at` is a group index, a training step, or a time in seconds."""

    SAMPLE = "sample"
    GROUP = "group"
    STEP = "step"
    TIME = "time"


class FaultKind(Enum):
    """What can go wrong. The comment says what the rollout must make of it."""

    CONNECTION_LOST = "connection_lost"  # one sample is tried again
    HTTP_5XX = "http_5xx"  # one sample is tried again
    HANG = "hang"  # the deadline ends it, or the connection breaks at last
    ABORTED = "aborted"  # one sample is tried again
    FAILED = "failed"  # one sample is tried again
    STRAGGLER = "straggler"  # nothing: it takes as long as it takes
    GENERATE_RAISES = "generate_raises"  # fatal
    GENERATE_LEAKS_CANCELLATION = "generate_leaks_cancellation"  # fatal
    GENERATE_RETURNS_NONSENSE = "generate_returns_nonsense"  # fatal
    REWARD_RAISES = "reward_raises"  # fatal
    REWARD_LEAKS_CANCELLATION = "reward_leaks_cancellation"  # fatal
    REWARD_NAN = "reward_nan"  # fatal, or the sample is marked, by flag
    REWARD_NONE = "reward_none"  # fatal, or the sample is marked, by flag
    FILTER_DROPS = "filter_drops"  # the group is dropped
    FILTER_DROPS_MANY = "filter_drops_many"  # a budget for empty batches ends the run, where there is one
    FILTER_RAISES = "filter_raises"  # that drain raises
    SOURCE_RAISES = "source_raises"  # fatal
    TRAIN_FAILS = "train_fails"  # the batch is given back
    DRAIN_CANCELLED = "drain_cancelled"  # nothing: the next call gets the groups
    EVAL = "eval"  # submission pauses and goes on
    EVAL_FAILS = "eval_fails"  # submission pauses and goes on
    EVAL_CANCELLED = "eval_cancelled"  # submission pauses and goes on
    SAVE_MID_STEP = "save_mid_step"  # the drained batch is part of the state
    SAVE_ANY_TIME = "save_any_time"  # whatever is going on
    ENGINE_DIES = "engine_dies"  # its samples are tried again elsewhere
    ENGINE_SLOW = "engine_slow"  # nothing
    ENGINES_HANG = "engines_hang"  # where a flag limits the wait, the run ends and says what is stuck
    KILL = "kill"  # the next process goes on from the last save

    @property
    def target(self) -> Target:
        return _TARGETS.get(self, Target.SAMPLE)

    @property
    def is_fatal(self) -> bool:
        """Whether it must end the run, with the error raised by a drain."""
        return self in _FATAL


_TARGETS = {
    FaultKind.FILTER_DROPS: Target.GROUP,
    FaultKind.FILTER_DROPS_MANY: Target.GROUP,
    FaultKind.FILTER_RAISES: Target.GROUP,
    FaultKind.SOURCE_RAISES: Target.GROUP,
    FaultKind.TRAIN_FAILS: Target.STEP,
    FaultKind.DRAIN_CANCELLED: Target.STEP,
    FaultKind.EVAL: Target.STEP,
    FaultKind.EVAL_FAILS: Target.STEP,
    FaultKind.EVAL_CANCELLED: Target.STEP,
    FaultKind.SAVE_MID_STEP: Target.STEP,
    FaultKind.ENGINE_DIES: Target.TIME,
    FaultKind.ENGINE_SLOW: Target.TIME,
    FaultKind.ENGINES_HANG: Target.TIME,
    FaultKind.SAVE_ANY_TIME: Target.TIME,
    FaultKind.KILL: Target.TIME,
}
_FATAL = frozenset(
    {
        FaultKind.GENERATE_RAISES,
        FaultKind.GENERATE_LEAKS_CANCELLATION,
        FaultKind.GENERATE_RETURNS_NONSENSE,
        FaultKind.REWARD_RAISES,
        FaultKind.REWARD_LEAKS_CANCELLATION,
        FaultKind.SOURCE_RAISES,
    }
)
_RARE = _FATAL | {FaultKind.KILL, FaultKind.REWARD_NAN, FaultKind.REWARD_NONE, FaultKind.FILTER_RAISES}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, `times` times at the same place; `member` is the sample of a group or the engine."""

    kind: FaultKind
    at: float
    member: int = 0
    times: int = 1
    seconds: float = 1.0

    def __str__(self) -> str:
        where = {
            Target.SAMPLE: f"group {self.at:g} member {self.member}",
            Target.GROUP: f"group {self.at:g}",
            Target.STEP: f"step {self.at:g}",
            Target.TIME: f"{self.at:.2f} s",
        }[self.kind.target]
        return f"{self.kind.value} at {where}" + (f" x{self.times}" if self.times > 1 else "")


@dataclass(frozen=True)
class Schedule:
    """The run that a seed stands for. Times in seconds of virtual time; the defaults are the simplest run."""

    seed: int = 0
    steps: int = 4
    prompts: int = 150
    data_groups: int | None = None
    """Prompt groups after which the data source has no more; None where epoch follows epoch."""

    shuffle: bool = False
    rollout_batch_size: int = 2
    n_samples_per_prompt: int = 2
    async_max_concurrent_samples: int | None = None
    max_weight_staleness: int | None = None
    capacity_factor: float | None = None
    max_bytes: int | None = None
    store: str = "builtin"
    """The store of finished groups: the built-in one, or one of `miles.sim.store`: newest_first, refusing."""

    nested: bool = False
    granularity: str = "group"
    unused_handler: str = "retry"
    max_group_retries: int = 8
    sample_max_retries: int = 3
    sample_timeout: float | None = None
    group_timeout: float | None = None
    no_progress_timeout: float | None = None
    max_empty_batches: int | None = None
    missing_reward: str = "error"
    group_rm: bool = False
    sync_reward: bool = False
    acknowledges: bool = True
    drains_early: bool = False
    engines: int = 1
    pause_mode: str = "retract"
    first_version: int = 0
    version_labels: str = "number"
    passes_version: bool = True
    update_interval: int = 1
    save_interval: int = 1
    train_seconds: float = 1.0
    update_seconds: float = 0.2
    tail_alpha: float = 1.5
    faults: tuple[Fault, ...] = ()

    @classmethod
    def from_seed(cls, seed: int) -> Schedule:
        """The schedule of this seed, the same on every machine."""
        return _from_random(seed, random.Random(seed))

    def without_faults(self) -> Schedule:
        return replace(self, faults=())

    def differences(self) -> dict[str, object]:
        """The fields that are not at their simplest."""
        simplest = Schedule()
        return {name: value for name, value in vars(self).items() if value != getattr(simplest, name)}


def _from_random(seed: int, rng: random.Random) -> Schedule:
    batch, members, steps = rng.randint(1, 5), rng.randint(1, 4), rng.randint(4, 8)
    labels = rng.choice(["number", "number", "number", "hash"])
    sync_like = rng.random() < 0.1  # the limit 0 behaves like synchronous training
    schedule = Schedule(
        seed=seed,
        steps=steps,
        prompts=rng.choice([2, 7, 23, 150]),
        data_groups=rng.randint(1, 2 * batch * steps) if rng.random() < 0.2 else None,
        shuffle=rng.random() < 0.5,
        rollout_batch_size=batch,
        n_samples_per_prompt=members,
        async_max_concurrent_samples=rng.choice([None, None, 1, 4, 8, 16, 24]),
        max_weight_staleness=0 if sync_like else rng.choice([None, 1, 1, 2, 3]),
        capacity_factor=rng.choice([None, 0.5, 1.0, 2.0]),
        max_bytes=rng.choice([None, None, None, 5_000, 20_000]),
        store=rng.choice(["builtin", "builtin", "builtin", "newest_first", "refusing"]),
        nested=rng.random() < 0.2,
        granularity=rng.choice(["group", "sample"]),
        unused_handler=rng.choice(["retry", "retry", "retry", "drop"]),
        max_group_retries=rng.choice([8, 8, 0, 1, 2]),
        sample_max_retries=rng.choice([3, 3, 1, 1]),
        sample_timeout=rng.choice([None, None, 15.0, 40.0]),
        group_timeout=rng.choice([None, None, None, 60.0]),
        no_progress_timeout=rng.choice([None, 45.0, 100.0]),
        max_empty_batches=rng.choice([None, 1, 2, 4]),
        missing_reward=rng.choice(["error", "remove"]),
        group_rm=rng.random() < 0.15,
        sync_reward=rng.random() < 0.2,
        acknowledges=rng.random() < 0.9,
        drains_early=rng.random() < 0.3,
        engines=rng.randint(1, 3),
        pause_mode=rng.choice(["abort", "retract", "in_place"]),
        first_version=rng.choice([0, 0, 7, 98]),
        version_labels=labels,
        passes_version=labels == "number" and rng.random() < 0.7,
        update_interval=rng.choice([1, 1, 1, 2, 3]),
        save_interval=rng.choice([1, 2, 3]),
        train_seconds=rng.choice([0.0, 0.5, 2.0, 6.0]),
        update_seconds=rng.choice([0.0, 0.2, 1.0]),
        tail_alpha=rng.choice([1.1, 1.5, 3.0]),
    )
    return replace(schedule, faults=tuple(_faults(schedule, rng)))


def _faults(schedule: Schedule, rng: random.Random) -> list[Fault]:
    groups = schedule.rollout_batch_size * schedule.steps
    until = schedule.steps * (schedule.train_seconds + schedule.update_seconds + 1.0)
    faults: list[Fault] = []
    for kind in FaultKind:
        while rng.random() < (0.13 if kind in _RARE else 0.25):
            at: float = {
                Target.SAMPLE: rng.randrange(groups),
                Target.GROUP: rng.randrange(groups),
                Target.STEP: rng.randrange(schedule.steps),
                Target.TIME: round(rng.uniform(0, until), 2),
            }[kind.target]
            most = schedule.engines if kind.target is Target.TIME else schedule.n_samples_per_prompt
            times = rng.choice([1, 1, 1, 2, 6]) if kind.target is Target.SAMPLE and not kind.is_fatal else 1
            faults.append(Fault(kind, at, rng.randrange(most), times, seconds=round(rng.uniform(0.1, 8.0), 2)))
    return faults
