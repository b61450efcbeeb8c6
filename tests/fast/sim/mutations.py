"""Faulty variants of the real classes: mistakes that somebody could make, and that the simulation must notice."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import miles.rollout._fully_async_wait as waiting
import miles.rollout.fully_async_rollout as heart
from miles.rollout._fully_async_errors import no_progress
from miles.rollout._fully_async_finished import FinishedGroups
from miles.rollout._fully_async_patience import Patience
from miles.rollout._fully_async_prompts import PromptSupply
from miles.rollout._fully_async_refusals import Refusals
from miles.rollout._fully_async_snapshot import Moment
from miles.rollout._fully_async_tasks import GroupTasks
from miles.rollout._fully_async_trainer import TrainerSide
from miles.rollout._fully_async_versions import WeightVersions
from miles.rollout._submission_gate import PausableSubmission
from miles.rollout.fully_async_rollout import FullyAsyncRolloutFn
from miles.utils.types import Sample
from miles.utils.user_calls import UserCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest

    Mutation = Callable[[pytest.MonkeyPatch], None]


def cursor_advanced_at_pull(patch: pytest.MonkeyPatch) -> None:
    """A save has the data cursor behind what was pulled and forgets what is in flight."""
    encode = Moment.encode
    patch.setattr(Moment, "encode", lambda self: {**encode(self), "prompts": []})


def staleness_checked_at_the_drain(patch: pytest.MonkeyPatch) -> None:
    """A group is measured when it is taken from the queue, and not again when its batch is handed over."""
    patch.setattr(FullyAsyncRolloutFn, "_remove_outdated", lambda self, keys, report: False)


def versions_compared_as_strings(patch: pytest.MonkeyPatch) -> None:
    """9 is newer than 10."""
    age = WeightVersions.age

    def age_by_text(self: WeightVersions, label: object, current: Any = None) -> int | None:
        against = self.current if current is None else current
        return 0 if str(label) >= str(against) else age(self, label, current)

    patch.setattr(WeightVersions, "age", age_by_text)


def worker_swallows_its_cancellation(patch: pytest.MonkeyPatch) -> None:
    """close() cancels the worker, which goes on."""
    run_worker = FullyAsyncRolloutFn._run_worker

    async def stubborn(self: FullyAsyncRolloutFn) -> None:
        try:
            await run_worker(self)
        except asyncio.CancelledError:
            await asyncio.sleep(3600)

    patch.setattr(FullyAsyncRolloutFn, "_run_worker", stubborn)


def leaked_cancellation_swallowed(patch: pytest.MonkeyPatch) -> None:
    """A child that ends cancelled by itself is taken for one that was stopped."""
    patch.setattr(UserCode, "__exit__", lambda self, exc_type, exc, traceback: None)
    keep = GroupTasks._keep

    def keep_others(self: GroupTasks, error: BaseException, key: Any) -> None:
        if not isinstance(error.__cause__, asyncio.CancelledError):
            keep(self, error, key)

    patch.setattr(GroupTasks, "_keep", keep_others)
    patch.setattr(heart, "generate_and_rm_group", _without_cancelled(heart.generate_and_rm_group))


def _without_cancelled(generate: Any) -> Any:
    async def tolerant(state: Any, group: Any, **keywords: Any) -> Any:
        try:
            return await generate(state, group, **keywords)
        except RuntimeError as error:
            if "cancel" not in str(error):
                raise
            raise asyncio.CancelledError from error

    return tolerant


def sibling_dropped(patch: pytest.MonkeyPatch) -> None:
    """A group comes back without its last member, and nobody counts."""
    generate = heart.generate_and_rm_group

    async def careless(state: Any, group: Any, **keywords: Any) -> Any:
        return (await generate(state, group, **keywords))[: max(1, len(group) - 1)]

    patch.setattr(heart, "generate_and_rm_group", careless)
    patch.setattr(heart, "require_members", lambda *arguments: None)


def get_leaked(patch: pytest.MonkeyPatch) -> None:
    """A cancelled drain leaves its get behind, which takes a group that nobody will ever see."""

    async def abandon(self: FinishedGroups, getting: Any) -> None:
        pass

    patch.setattr(FinishedGroups, "_abandon", abandon)


def wake_up_lost_when_the_queue_empties(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits for room is not told when the last group is taken."""
    fill = FinishedGroups._fill

    def forgetful(self: FinishedGroups) -> None:
        if self.size:
            fill(self)

    patch.setattr(FinishedGroups, "_fill", forgetful)


def slot_freed_twice(patch: pytest.MonkeyPatch) -> None:
    """Samples free their slots one by one, and the group frees all of them again."""

    def free_one(key: Any) -> None:
        key.places._spare += 1

    patch.setattr(heart, "free_one", free_one)


def acknowledged_batch_given_back(patch: pytest.MonkeyPatch) -> None:
    """What has been trained can still be given back."""
    acknowledge, give_back = TrainerSide.acknowledge, TrainerSide.give_back
    acknowledged: dict[tuple[int, int], list[Any]] = {}

    def remember(self: TrainerSide, rollout_id: int) -> int:
        batch = self._batches.get(rollout_id)
        if batch is not None:
            acknowledged[id(self), rollout_id] = batch.keys
        return acknowledge(self, rollout_id)

    def again(self: TrainerSide, rollout_id: int) -> list[Any]:
        return acknowledged.pop((id(self), rollout_id), None) or give_back(self, rollout_id)

    patch.setattr(TrainerSide, "acknowledge", remember)
    patch.setattr(TrainerSide, "give_back", again)
    patch.setattr(FinishedGroups, "put_back", lambda self, keys: None)


def recycled_group_not_reset(patch: pytest.MonkeyPatch) -> None:
    """A group starts over with its old answers."""
    take_back = PromptSupply.take_back

    def careless(self: PromptSupply, prompt_group: Any) -> None:
        with patch.context() as inner:
            inner.setattr(Sample, "reset_for_retry", lambda sample: None)
            take_back(self, prompt_group)

    patch.setattr(PromptSupply, "take_back", careless)


def eval_forgets_to_resume(patch: pytest.MonkeyPatch) -> None:
    """Submission stays paused after an evaluation."""
    patch.setattr(FullyAsyncRolloutFn, "resume_submission", lambda self: None)


def eval_resumes_only_where_it_ends_well(patch: pytest.MonkeyPatch) -> None:
    """An evaluation that fails or is cancelled leaves submission paused."""

    @asynccontextmanager
    async def careless(self: PausableSubmission) -> AsyncIterator[None]:
        self.pause_submission()
        yield
        self.resume_submission()

    patch.setattr(PausableSubmission, "submission_paused", careless)


def resume_wakes_nobody(patch: pytest.MonkeyPatch) -> None:
    """The gate opens, and the worker that waits before it is not told."""
    patch.setattr(FullyAsyncRolloutFn, "resume_submission", PausableSubmission.resume_submission)


def no_progress_never_noticed(patch: pytest.MonkeyPatch) -> None:
    """A call waits for ever, whatever --no-progress-timeout says."""
    patch.setattr(Patience, "is_over", lambda self, now: False)


def no_progress_noticed_at_the_next_warning(patch: pytest.MonkeyPatch) -> None:
    """A call looks at its limit only when it looks whether to warn."""
    patch.setattr(Patience, "next_look", lambda self, now: self._warned + self._warn_every - now)


def stuck_groups_not_listed(patch: pytest.MonkeyPatch) -> None:
    """The error says that there is no progress and not of what."""
    patch.setattr(waiting, "no_progress", lambda waited, stuck, now, engines: no_progress(waited, [], now, engines))


def empty_batches_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Groups are turned down for ever, whatever --max-empty-batches says."""
    patch.setattr(Refusals, "require_budget", lambda self: None)


def kept_group_does_not_renew_the_budget(patch: pytest.MonkeyPatch) -> None:
    """Groups that were turned down are counted over the whole run, not in a row."""
    patch.setattr(Refusals, "one_was_kept", lambda self: None)


def data_ends_while_groups_are_in_flight(patch: pytest.MonkeyPatch) -> None:
    """The data source has no more prompts: that is taken for the end."""

    def hasty(self: FullyAsyncRolloutFn) -> None:
        self._wake.set()
        for waiter in self._end_waiters if self._prompts.ended else ():
            if not waiter.done():
                waiter.set_result(None)

    patch.setattr(FullyAsyncRolloutFn, "_look_again", hasty)


def group_refused_by_a_store_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A custom store gives a group up, and nobody takes it back."""
    patch.setattr(Refusals, "unused_by_store", lambda self, prompt_group: None)


MUTATIONS: tuple[Mutation, ...] = (
    cursor_advanced_at_pull,
    staleness_checked_at_the_drain,
    versions_compared_as_strings,
    worker_swallows_its_cancellation,
    leaked_cancellation_swallowed,
    sibling_dropped,
    get_leaked,
    wake_up_lost_when_the_queue_empties,
    slot_freed_twice,
    acknowledged_batch_given_back,
    recycled_group_not_reset,
    eval_forgets_to_resume,
    eval_resumes_only_where_it_ends_well,
    resume_wakes_nobody,
    no_progress_never_noticed,
    no_progress_noticed_at_the_next_warning,
    stuck_groups_not_listed,
    empty_batches_not_counted,
    kept_group_does_not_renew_the_budget,
    data_ends_while_groups_are_in_flight,
    group_refused_by_a_store_is_forgotten,
)
