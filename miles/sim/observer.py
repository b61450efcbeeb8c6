"""The independent observer: it sees the data source's two doors, the filter's verdicts and the trainer's steps.

It knows nothing of queues, tasks or ledgers, and keeps its own books of who must be where:

    fresh --pulled--> outstanding --step done--> trained
                       ^      |  \\--filter, retries used up--> dropped
                       |      v
                      given back (first in line again)

Every method raises Violation where the rollout breaks a promise. `copy` and `go_back_to` follow saves and kills: what
counts is the surviving lineage, the steps of the last save and those after it.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles.sim.source import MemoryDataset

if TYPE_CHECKING:
    from miles.sim.engines import EnginePool
    from miles.sim.schedule import Schedule
    from miles.sim.trace import Trace
    from miles.utils.types import Sample


@dataclass
class Books:
    """Where every group is, by group index, along the surviving lineage."""

    next_fresh: int = 0
    outstanding: dict[int, int] = field(default_factory=dict)
    """Groups that were pulled and are not settled, with the number of times they were pulled."""

    given_back: dict[int, int] = field(default_factory=dict)
    restored: set[int] = field(default_factory=set)
    """Outstanding since before the last restart: these may be pulled once more, or be handed over as they are."""

    trained: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)


class Observer:
    """Keeps the books of one simulated run, over all its processes."""

    def __init__(self, schedule: Schedule, engines: EnginePool, trace: Trace) -> None:
        self.schedule = schedule
        self.engines = engines
        self.trace = trace
        self.books = Books()
        self.counts: Counter[str] = Counter()  # of this process: pulled, returned, trained, dropped
        self.errors: list[tuple[float, BaseException]] = []
        self.began_at: dict[int, float] = {}  # when it was pulled, or re-issued after a restart
        self.empty_batches: int | None = schedule.max_empty_batches
        self.gave_up_after: object = None  # the save that a process had when nothing got through last
        self.turned_down = 0  # groups in a row that this process has generated, since the filter let one pass
        self._judged: int | None = None  # the group that a call has taken and not decided about
        self._budget_is_used_up = False
        self._expected = MemoryDataset(schedule.prompts, schedule.seed)

    # ---- the data source's doors

    def pulled(self, group: list[Sample]) -> None:
        index = index_of(group)
        books = self.books
        self.counts["pulled"] += 1
        if index in books.given_back:
            books.outstanding[index] = books.given_back.pop(index) + 1
        elif index in books.restored:
            books.restored.discard(index)
            books.outstanding[index] += 1
        elif index == books.next_fresh:
            books.next_fresh += 1
            books.outstanding[index] = 1
        else:
            self.trace.violate(f"group {index} is pulled, expected {books.next_fresh} or one that was given back")
        if group[0].prompt != (expected := self._prompt_of(index)):
            self.trace.violate(f"group {index} has the prompt {group[0].prompt}, expected {expected}")
        self.began_at[index] = asyncio.get_running_loop().time()
        self.trace.add("pull", index)

    def _prompt_of(self, index: int) -> Any:
        epoch, offset = divmod(index, len(self._expected))
        if self.schedule.shuffle:
            self._expected.shuffle(epoch)
        return self._expected.samples[offset].prompt

    def returned(self, group: list[Sample]) -> None:
        index = index_of(group)
        self.counts["returned"] += 1
        self._require_outstanding(index, "is given back to the data source")
        self.books.given_back[index] = self.books.outstanding.pop(index)
        self._turn_down(index)
        for sample in group:
            if sample.tokens or sample.response or sample.reward is not None or sample.weight_versions:
                self.trace.violate(f"group {index} is given back and still carries the answer {sample.response!r}")
        self.trace.add("recycle", index)

    # ---- what ends a group

    def dropped(self, index: int, reason: str) -> None:
        self.counts["dropped"] += 1
        self._require_outstanding(index, f"is dropped ({reason})")
        del self.books.outstanding[index]
        self.books.dropped[index] = reason
        self._turn_down(index)
        self.trace.add("drop", index, reason)

    def dropped_by_handler(self, index: int, reason: str) -> None:
        """The handler of unused groups drops it: allowed by its flag, or after the retries that another flag grants."""
        schedule = self.schedule
        self._require_outstanding(index, f"is dropped ({reason})")
        pulls = self.books.outstanding[index]
        if schedule.unused_handler == "retry" and pulls <= schedule.max_group_retries:
            self.trace.violate(f"group {index} is dropped ({reason}) after {pulls} pulls")
        self.dropped(index, reason)

    def generation_begins(self, index: int) -> None:
        """A restored group is re-issued without the data source."""
        self.began_at.setdefault(index, asyncio.get_running_loop().time())

    # ---- the budget for empty batches

    def drained(self, index: int) -> None:
        """A call has taken the group, and will decide about it."""
        self.require_no_end()
        self._judged = index

    def kept(self, index: int) -> None:
        """The filter lets the group pass."""
        self.turned_down, self._judged = 0, None

    def _turn_down(self, index: int) -> None:
        if index not in self.books.restored or index in self.began_at:  # else it was finished before the restart
            self.turned_down += 1
        self.books.restored.discard(index)
        if index == self._judged:
            self._judged = None
            most = self.empty_batches
            self._budget_is_used_up = most is not None and self.turned_down >= most * self.schedule.rollout_batch_size

    def require_no_end(self) -> None:
        """The call goes on."""
        if self._budget_is_used_up:
            self.trace.violate(f"a call goes on after {self.turned_down} groups in a row were turned down")

    def nothing_gets_through(self, message: str) -> None:
        """A call raises NothingGetsThrough."""
        most = self.empty_batches
        if most is None or self.turned_down < most * self.schedule.rollout_batch_size:
            self.trace.violate(f"a call gives up after {self.turned_down} groups in a row: {message}")
        if not message.startswith(f"{self.turned_down} finished groups in a row were turned down"):
            self.trace.violate(f"{self.turned_down} groups in a row were turned down, the call says: {message}")
        self.trace.add("nothing gets through", self.turned_down)

    # ---- the end of the data

    def data_ended(self) -> None:
        """A call raises EndOfData."""
        books = self.books
        if not self._all_pulled or books.outstanding or books.given_back:
            left = sorted({*books.outstanding, *books.given_back})
            self.trace.violate(
                f"the data ends after {books.next_fresh} groups, and {left} are neither trained nor dropped"
            )
        self.trace.add("end of data", books.next_fresh)

    @property
    def _all_pulled(self) -> bool:
        return self.books.next_fresh == self.schedule.data_groups

    def _is_last_batch(self, indexes: list[int]) -> bool:
        """Whether these groups are all that is left of the data."""
        return self._all_pulled and not self.books.given_back and self.books.outstanding.keys() == set(indexes)

    # ---- the trainer's steps

    def step_starts(self, step: int, batch: list[list[Any]]) -> None:
        """The trainer begins a step: everything in the batch is outstanding, whole, sorted and fresh enough."""
        indexes = [index_of(group) for group in batch]
        whole = len(indexes) == self.schedule.rollout_batch_size
        if indexes != sorted(set(indexes)) or not (whole or (indexes and self._is_last_batch(indexes))):
            self.trace.violate(f"step {step} has the groups {indexes}")
        for index, group in zip(indexes, batch, strict=True):
            self._require_outstanding(index, f"is handed to step {step}")
            self._check_answers(index, group)
            self._check_staleness(index, group, step)
        self.trace.add("train start", step, indexes)

    def step_done(self, step: int, batch: list[list[Any]]) -> None:
        for group in batch:
            index = index_of(group)
            self.counts["trained"] += 1
            del self.books.outstanding[index]
            self.books.restored.discard(index)
            self.books.trained[index] = step
        self.trace.add("train end", step)

    def _require_outstanding(self, index: int, event: str) -> None:
        if index in self.books.outstanding:
            return
        books = self.books
        if index in books.trained:
            where = f"was trained in step {books.trained[index]}"
        elif index in books.dropped:
            where = f"was dropped ({books.dropped[index]})"
        else:
            where = "waits in the data source" if index in books.given_back else "was never pulled"
        self.trace.violate(f"group {index} {event}, but it {where}")

    def _check_answers(self, index: int, group: list[Any]) -> None:
        if len(group) != self.schedule.n_samples_per_prompt:
            self.trace.violate(f"group {index} has {len(group)} members")
        for sample in samples_of(group):
            answer = self.engines.answers.get(sample.response)
            if answer is None or (answer.group_index, answer.member) != (
                index,
                sample.index % self.schedule.n_samples_per_prompt,
            ):
                self.trace.violate(
                    f"group {index}: sample {sample.index} has the answer {sample.response!r} of another"
                )
            if not sample.status.is_finished:
                self.trace.violate(f"group {index}: sample {sample.index} is handed over {sample.status.value}")
            value = sample.reward
            missing = value is None or (isinstance(value, float) and math.isnan(value))
            if missing and not sample.remove_sample:
                self.trace.violate(f"group {index}: sample {sample.index} is trained with the reward {value}")

    def _check_staleness(self, index: int, group: list[Any], step: int) -> None:
        limit = self.schedule.max_weight_staleness
        if limit is None:
            return
        oldest = min(self.engines.oldest_version(sample.response) for sample in samples_of(group))
        staleness = self.engines.versions.current - oldest
        if staleness > limit:
            self.trace.violate(
                f"group {index} is {staleness} versions old when step {step} starts, the limit is {limit}"
            )

    # ---- errors of user code, and lives

    def fatal(self, error: BaseException) -> None:
        """User code has failed: from now on no batch may be handed over, and the error must be raised."""
        self.errors.append((asyncio.get_running_loop().time(), error))

    def copy(self) -> Books:
        return copy.deepcopy(self.books)

    def go_back_to(self, books: Books) -> None:
        """A new process starts from this state."""
        self.books = copy.deepcopy(books)
        self.books.restored = set(books.outstanding)
        self.counts.clear()
        self.errors.clear()
        self.began_at.clear()
        self.turned_down, self._judged, self._budget_is_used_up = 0, None, False


def samples_of(group: list[Any]) -> list[Any]:
    """The samples of a group whose members may be lists."""
    return [s for member in group for s in (member if isinstance(member, list) else [member])]


def index_of(group: list[Any]) -> int:
    first = group[0][0] if isinstance(group[0], list) else group[0]
    assert first.group_index is not None
    return int(first.group_index)
