"""The books of the fully-async rollout: every prompt group that was pulled has exactly one owner at each moment.

                      +----------- give_back ------------+
                      v                                  |
    pull ---> IN_FLIGHT ---> QUEUED ---> DRAINED ---> TRAINED
                  |            |            |
                  +------------+------------+---> RECYCLED (reason): back to the data source; its re-issue is a new pull
                                            +---> DROPPED  (reason): never trained

The count of each owner is kept by the transitions into it and out of it, none is derived from another, and after each
transition the books must balance, in production too (it costs four additions). A group that was trained, recycled or
dropped is forgotten: only counts are left of it.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miles.rollout._fully_async_groups import Group, PromptGroup
    from miles.rollout._fully_async_slots import SampleSlots


class Owner(Enum):
    """Who has a group."""

    IN_FLIGHT = "in_flight"
    QUEUED = "queued"
    DRAINED = "drained"
    TRAINED = "trained"
    RECYCLED = "recycled"
    DROPPED = "dropped"


class RecycleReason(Enum):
    """Why a group goes back to the data source, to be generated again."""

    ABORTED = "aborted"
    STALE = "stale"
    UNUSED = "unused"
    """A custom data buffer gave it to its unused handler."""
    RESTORED = "restored"
    """It was in flight when the state was saved that this run goes on from."""


class DropReason(Enum):
    """Why a group is never trained."""

    FILTERED = "filtered"
    MAX_RETRIES = "max_retries"
    ABORTED = "aborted"
    """As the three below: `--async-unused-samples-handler drop`."""
    STALE = "stale"
    UNUSED = "unused"


class LedgerError(AssertionError):
    """The rollout has lost or doubled a group: a fault of this project, never of its user."""


class GroupKey:
    """One pull of one prompt group, from there to its end. Times are loop time in seconds.

    Unpacks into `(prompt_group, group)`: it is what stands in the built-in store once the group is finished.
    """

    __slots__ = (
        "aborted",
        "finished_at",
        "finished_version",
        "group",
        "measured_serial",
        "number",
        "owner",
        "places",
        "prompt_group",
        "pulled_at",
        "rollout_id",
        "samples",
        "size_bytes",
        "slots",
        "staleness",
        "tokens",
        "unversioned",
        "versions",
    )

    number: int
    """Counts pulls from 0."""

    prompt_group: PromptGroup
    owner: Owner
    pulled_at: float
    group: Group | None
    """What generation made of it, once it has."""

    finished_at: float | None
    finished_version: int | str | None
    """The trainer's weight version at that moment, None where it had told none."""

    rollout_id: int | None
    """The call that has drained it."""

    places: SampleSlots
    """Where it has them, set when it gets them."""

    slots: int
    """Samples that hold a place in generation."""

    samples: int
    tokens: int
    """Response tokens."""

    size_bytes: int
    versions: tuple[int | str, ...]
    """The distinct weight versions that wrote the group, in no order."""

    unversioned: int
    """Samples that carry no weight version."""

    staleness: int | None
    """Versions that it lagged behind when it was measured last."""

    measured_serial: int | None
    """Which of the trainer's versions that was (`WeightVersions.serial`)."""

    aborted: bool

    def __init__(self, number: int, prompt_group: PromptGroup, owner: Owner, pulled_at: float) -> None:
        self.number = number
        self.prompt_group = prompt_group
        self.owner = owner
        self.pulled_at = pulled_at
        self.group = self.finished_at = self.finished_version = self.rollout_id = None
        self.slots = self.samples = self.tokens = self.size_bytes = self.unversioned = 0
        self.versions = ()
        self.staleness = self.measured_serial = None
        self.aborted = False

    def __iter__(self) -> Iterator[Any]:
        return iter((self.prompt_group, self.group))

    def __getitem__(self, index: int) -> Any:
        return (self.prompt_group, self.group)[index]

    @property
    def group_index(self) -> int | None:
        return self.prompt_group[0].group_index if self.prompt_group else None


class GroupObserver(Protocol):
    """Sees every transition after it has happened. Must be quick, and must not raise."""

    def on_transition(
        self, key: GroupKey, group_index: int | None, old: Owner | None, new: Owner, reason: str | None, now: float
    ) -> None: ...


_SUMS = ("generated_samples", "generated_tokens", "trained_samples", "trained_tokens")
_IN_FLIGHT, _QUEUED, _DRAINED = Owner.IN_FLIGHT, Owner.QUEUED, Owner.DRAINED
_TRAINED, _RECYCLED, _DROPPED = Owner.TRAINED, Owner.RECYCLED, Owner.DROPPED


def _running_loop_time() -> float:
    return asyncio.get_running_loop().time()


class GroupLedger:
    """Counts, owners and ends of all groups. Each transition raises LedgerError where the
    group does not have the owner that it starts from, or the books do not balance after it."""

    def __init__(self, clock: Callable[[], float] = _running_loop_time) -> None:
        self.clock = clock
        self.observers: list[GroupObserver] = []
        self.open: dict[int, GroupKey] = {}  # in flight, queued and drained ones, in the order of their pulls
        self.pulled = 0
        self.in_flight = 0
        self.queued = 0
        self.queue_peak = 0
        self.drained = 0
        self.trained = 0
        self.recycled = 0
        self.dropped = 0
        self.recycled_by: dict[RecycleReason, int] = dict.fromkeys(RecycleReason, 0)
        self.dropped_by: dict[DropReason, int] = dict.fromkeys(DropReason, 0)
        self.generated_samples = 0
        self.generated_tokens = 0
        self.trained_samples = 0
        self.trained_tokens = 0
        self.wasted_tokens: dict[str, int] = {r.value: 0 for r in (*RecycleReason, *DropReason)}

    # ---- transitions

    def pull(self, prompt_group: PromptGroup) -> GroupKey:
        """The data source has handed the group out: IN_FLIGHT."""
        number = self.pulled
        self.open[number] = key = GroupKey(number, prompt_group, _IN_FLIGHT, self.clock())
        self.pulled = number + 1
        self.in_flight += 1
        held = self.in_flight + self.queued + self.drained
        if self.pulled != held + self.trained + self.recycled + self.dropped or held != len(self.open):
            raise self._imbalance()
        if self.observers:
            self._tell(key, None)
        return key

    def enter(self, prompt_group: PromptGroup) -> GroupKey:
        """A finished group that somebody else has put into the store: pulled and QUEUED in one."""
        key = GroupKey(self.pulled, prompt_group, _QUEUED, self.clock())
        self.open[key.number] = key
        self.pulled += 1
        self.queued += 1
        if self.queued > self.queue_peak:
            self.queue_peak = self.queued
        self._after(key, None)
        return key

    def queue(self, key: GroupKey) -> None:
        """Generation has finished it, or a drain or a training step gives it back: QUEUED."""
        old = key.owner
        if old is _IN_FLIGHT:
            self.in_flight -= 1
        elif old is _DRAINED:
            self.drained -= 1
            key.rollout_id = None
        else:
            raise self._illegal(key, _QUEUED)
        self.queued = queued = self.queued + 1
        if queued > self.queue_peak:
            self.queue_peak = queued
        key.owner = _QUEUED
        held = self.in_flight + self.queued + self.drained
        if self.pulled != held + self.trained + self.recycled + self.dropped or held != len(self.open):
            raise self._imbalance()
        if self.observers:
            self._tell(key, old)

    def drain(self, key: GroupKey, rollout_id: int) -> None:
        """A call has taken it out of the store, for this rollout's batch: DRAINED."""
        if key.owner is not _QUEUED:
            raise self._illegal(key, _DRAINED)
        self.queued -= 1
        self.drained += 1
        key.owner = _DRAINED
        key.rollout_id = rollout_id
        held = self.in_flight + self.queued + self.drained
        if self.pulled != held + self.trained + self.recycled + self.dropped or held != len(self.open):
            raise self._imbalance()
        if self.observers:
            self._tell(key, _QUEUED)

    def train(self, key: GroupKey) -> None:
        """The trainer has finished the step that used it: TRAINED."""
        if key.owner is not _DRAINED:
            raise self._illegal(key, _TRAINED)
        self.drained -= 1
        self.trained += 1
        self.trained_samples += key.samples
        self.trained_tokens += key.tokens
        key.owner = _TRAINED
        if self.open.pop(key.number, None) is not key:
            raise self._unknown(key)
        held = self.in_flight + self.queued + self.drained
        if self.pulled != held + self.trained + self.recycled + self.dropped or held != len(self.open):
            raise self._imbalance()
        if self.observers:
            self._tell(key, _DRAINED)

    def recycle(self, key: GroupKey, reason: RecycleReason) -> None:
        """It starts over: RECYCLED."""
        old = self._leave(key, _RECYCLED)
        self.recycled += 1
        self.recycled_by[reason] += 1
        self._waste(key, reason.value)
        self._after(key, old, reason.value)

    def drop(self, key: GroupKey, reason: DropReason) -> None:
        """Nobody wants it any more: DROPPED."""
        old = self._leave(key, _DROPPED)
        self.dropped += 1
        self.dropped_by[reason] += 1
        self._waste(key, reason.value)
        self._after(key, old, reason.value)

    # ---- saving

    def state_dict(self) -> dict[str, Any]:
        """The counts, JSON-ready."""
        return {
            **self.counts(),
            "recycled_by": {reason.value: count for reason, count in self.recycled_by.items()},
            "dropped_by": {reason.value: count for reason, count in self.dropped_by.items()},
            "wasted_tokens": dict(self.wasted_tokens),
            **{name: getattr(self, name) for name in _SUMS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these counts, with nothing open: what was in flight counts as recycled, and what was queued or
        drained as never pulled until it is entered again. Raises LedgerError where the counts do not balance."""
        if self.pulled:
            raise LedgerError(f"the state can only be loaded before the first pull: {self}")
        for name in ("trained", "recycled", "dropped", *_SUMS):
            setattr(self, name, int(state[name]))
        for reason in RecycleReason:
            self.recycled_by[reason] = int(state["recycled_by"].get(reason.value, 0))
        for drop_reason in DropReason:
            self.dropped_by[drop_reason] = int(state["dropped_by"].get(drop_reason.value, 0))
        for name in self.wasted_tokens:
            self.wasted_tokens[name] = int(state["wasted_tokens"].get(name, 0))
        self.recycled += int(state["in_flight"])
        self.recycled_by[RecycleReason.RESTORED] += int(state["in_flight"])
        self.pulled = int(state["pulled"]) - int(state["queued"]) - int(state["drained"])
        self.check()

    # ---- the books

    def finish(self, key: GroupKey) -> float:
        """Generation has ended, and the group's size is known: when. No transition: it is in flight until it is
        queued."""
        key.finished_at = now = self.clock()
        self.generated_samples += key.samples
        self.generated_tokens += key.tokens
        return now

    def take_queue_peak(self) -> int:
        """The most groups that were queued at once since the last call."""
        peak, self.queue_peak = self.queue_peak, self.queued
        return peak

    def check(self) -> None:
        """Raise LedgerError where the books do not balance."""
        held = self.in_flight + self.queued + self.drained
        if self.pulled != held + self.trained + self.recycled + self.dropped or held != len(self.open):
            raise self._imbalance()

    def held_by(self, owner: Owner) -> list[GroupKey]:
        """The open groups of this owner, in the order of their pulls. Looks at every open one."""
        return [key for key in self.open.values() if key.owner is owner]

    def find(self, prompt_group: PromptGroup) -> GroupKey | None:
        """The open pull of this very list. Looks at every open one."""
        return next((key for key in self.open.values() if key.prompt_group is prompt_group), None)

    def counts(self) -> dict[str, int]:
        """`pulled` and the count of each owner."""
        return {"pulled": self.pulled, **{owner.value: getattr(self, owner.value) for owner in Owner}}

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.counts().items()) + f", {len(self.open)} open"

    def _leave(self, key: GroupKey, new: Owner) -> Owner:
        old = key.owner
        if old is _IN_FLIGHT:
            self.in_flight -= 1
        elif old is _QUEUED:
            self.queued -= 1
        elif old is _DRAINED:
            self.drained -= 1
        else:
            raise self._illegal(key, new)
        key.owner = new
        if self.open.pop(key.number, None) is not key:
            raise self._unknown(key)
        return old

    def _waste(self, key: GroupKey, reason: str) -> None:
        self.wasted_tokens[reason] += key.tokens

    def _after(self, key: GroupKey, old: Owner | None, reason: str | None = None) -> None:
        """What every transition ends with. The four that each group makes say it themselves: a call less, and a third
        of their cost."""
        self.check()
        if self.observers:
            self._tell(key, old, reason)

    def _tell(self, key: GroupKey, old: Owner | None, reason: str | None = None) -> None:
        now = self.clock()
        for observer in self.observers:
            observer.on_transition(key, key.group_index, old, key.owner, reason, now)

    def _imbalance(self) -> LedgerError:
        return LedgerError(f"the books do not balance: {self}")

    def _unknown(self, key: GroupKey) -> LedgerError:
        return LedgerError(f"pull {key.number} (group {key.group_index}) is not in the books: {self}")

    def _illegal(self, key: GroupKey, new: Owner) -> LedgerError:
        return LedgerError(
            f"pull {key.number} (group {key.group_index}) is {key.owner.value} and cannot become {new.value}: {self}"
        )
