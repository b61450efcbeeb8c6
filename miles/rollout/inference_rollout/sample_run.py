"""One sample's way to a rewarded answer, with replacement of what fails for no fault of user code.

    prompt sample --[slot] generate function--> answer ------------------------------> reward --> done
         ^              |                         |                                       |
         |              | transport failure,      | ABORTED, FAILED                       | transport failure:
         |              | deadline                |                                       | asked again
         +-- reset, again: at most `sample_max_retries` times, while the state is not    | group deadline:
             aborted and what the siblings have finished may still be used               | ABORTED

What is given up comes back ABORTED, and the owner of the group decides. What user code raises flies, as it is.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generate_utils.request_ids import request_ids
from miles.rollout.inference_rollout.compatibility import SampleName, call_generate_function, describe
from miles.rollout.inference_rollout.engine_aborts import abort_requests
from miles.rollout.inference_rollout.sample_failures import (
    is_transport_failure,
    is_unanswered,
    mark_aborted,
    members,
    reason_of,
)
from miles.rollout.rm_hub import async_rm, batched_async_rm
from miles.rollout.rm_hub.validation import check_reward
from miles.utils.data import private_copy
from miles.utils.types import MISSING_REWARD, Sample

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miles.rollout.inference_rollout.deadlines import GroupClock
    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState

    Generated = Sample | list[Sample]

logger = logging.getLogger(__name__)


class DeadlinePassed(TimeoutError):
    """An attempt had not ended at its deadline and was ended on its engine."""


class SampleRun:
    """One sample. `str()` names it for errors.

    `may_retry`: whether the group still wants this sample alone. `on_generated`: called once, when the sample needs no
    generation slot any more, whichever way it went.
    """

    def __init__(
        self,
        state: GenerateState,
        sample: Sample,
        sampling_params: dict[str, Any],
        evaluation: bool,
        clock: GroupClock,
        *,
        may_retry: Callable[[], bool] = lambda: True,
        on_generated: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = state
        self._sample = sample
        self._sampling_params = sampling_params
        self._evaluation = evaluation
        self._clock = clock
        self._may_retry = may_retry
        self._on_generated = on_generated
        self._retries_left = state.sample_max_retries
        self.generated: Generated | None = None  # once it is final

    def __str__(self) -> str:
        return str(SampleName(self._sample))

    async def run(self) -> Generated:
        try:
            generated = self.generated = await self._generate()
        finally:
            self._on_generated()
        if is_unanswered(generated) or getattr(self._state.args, "group_rm", False):
            return generated
        self._check_own_rewards(generated)
        return await self._reward(generated)

    # ---- the answer

    async def _generate(self) -> Generated:
        while True:
            outcome = await self._attempt()
            if not isinstance(outcome, BaseException) and not is_unanswered(outcome):
                return outcome
            if not self._takes_retry():
                return self._give_up(outcome)
            self._state.sample_retries += 1
            self._state.notices.note(f"{self} is generated again", reason_of(outcome))
            self._reset(outcome)

    def _takes_retry(self) -> bool:
        if self._retries_left <= 0 or self._state.aborted or not self._may_retry():
            return False
        self._retries_left -= 1
        return True

    def _reset(self, outcome: Generated | BaseException) -> None:
        """The prompt sample as it was, except that an aborted answer is continued with --partial-rollout."""
        if isinstance(outcome, Sample) and outcome.status is Sample.Status.ABORTED and self._continues_answers:
            return
        self._sample.reset_for_retry()

    @property
    def _continues_answers(self) -> bool:
        return bool(getattr(self._state.args, "partial_rollout", False))

    def _give_up(self, outcome: Generated | BaseException) -> Generated:
        """What came of it, ABORTED; without retries, and in an evaluation, a transport failure is raised."""
        if not isinstance(outcome, BaseException):
            return outcome if self._state.sample_max_retries == 0 else mark_aborted(outcome)
        if not isinstance(outcome, DeadlinePassed) and (self._evaluation or self._state.sample_max_retries == 0):
            raise outcome
        self._state.notices.note(f"{self} is given up", reason_of(outcome))
        self._sample.reset_for_retry()
        return self._sample

    async def _attempt(self) -> Generated | BaseException:
        """One answer, or the transport failure or deadline that stood in its way: the one place that makes it data."""
        state = self._state
        if not state.starts.take():
            await state.starts.wait()
        async with state.generate_fn_semaphore:
            if state.aborted:
                self._sample.status = Sample.Status.ABORTED
                return self._sample
            with state.busy:
                deadline = None if self._evaluation else self._clock.begin_attempt()
                attempt = self._call() if deadline is None else self._call_until(deadline)
                if state.attempts is not None:
                    attempt = state.attempts.watch(self._sample, self._evaluation, attempt)
                try:
                    return await attempt
                except DeadlinePassed as passed:
                    return passed
                except Exception as error:
                    if not is_transport_failure(error):
                        raise
                    return error

    async def _call_until(self, deadline: float) -> Generated:
        with request_ids() as ids:
            limit = asyncio.timeout_at(deadline)
            try:
                async with limit:
                    return await self._call()
            except Exception as error:  # of a cancelled call nothing else is to be had, whatever it was turned into
                if not limit.expired():
                    raise
                passed = DeadlinePassed("no answer in time (--sample-timeout-secs, --group-timeout-secs)")
                passed.__cause__ = error
        self._state.sample_timeouts += 1
        await abort_requests(self._state.args, ids)
        raise passed

    async def _call(self) -> Generated:
        state, sample = self._state, self._sample
        own_params = {name: private_copy(value) for name, value in self._sampling_params.items()}
        input = GenerateFnInput(state=state, sample=sample, sampling_params=own_params, evaluation=self._evaluation)
        generated: Generated = await call_generate_function(state.generate_function_for(sample), input)
        return generated

    # ---- the reward

    async def _reward(self, generated: Generated) -> Generated:
        if await reward_in_time(self._state, self._clock, lambda: self._ask_for_reward(generated)):
            count_missing_rewards(self._state, members(generated), evaluation=self._evaluation)
            return generated
        self._state.notices.note(f"{self} is given up", "no reward within --group-timeout-secs")
        for member in members(generated):
            member.status = Sample.Status.ABORTED
        return generated

    def _check_own_rewards(self, generated: Generated) -> None:
        """Those that the generate function has set must be rewards, too."""
        for member in members(generated):
            if member.reward is not None:
                source = f"generate function {describe(self._state.generate_function_for(self._sample))}"
                member.reward = check_reward(member.reward, source, member, self._state.args)

    async def _ask_for_reward(self, generated: Generated) -> None:
        args = self._state.args
        while True:
            try:
                if isinstance(generated, list):
                    unrewarded = [member for member in generated if member.reward is None]
                    if unrewarded:
                        await batched_async_rm(args, unrewarded, inplace_set_reward_field=True)
                elif generated.reward is None:
                    generated.reward = await async_rm(args, generated)
                return
            except Exception as error:  # a reward server may be lost like an engine; the answer is kept
                if not is_transport_failure(error) or self._retries_left <= 0 or self._state.aborted:
                    raise
                self._retries_left -= 1
                self._state.notices.note(f"{self} is rewarded again", reason_of(error))


async def reward_in_time(state: GenerateState, clock: GroupClock, ask: Callable[[], Awaitable[None]]) -> bool:
    """Await `ask()`; False where the group's deadline came first, and what it was doing has been cancelled."""
    deadline = clock.group_deadline
    if deadline is None:
        await ask()
        return True
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            await ask()
    except Exception:
        if not limit.expired():
            raise
        state.sample_timeouts += 1
        return False
    return True


def count_missing_rewards(state: GenerateState, samples: list[Sample], *, evaluation: bool = False) -> None:
    """Count the samples whose reward is a placeholder. In an evaluation it is taken back: no reward there is None."""
    for sample in samples:
        if sample.reward_is_placeholder:
            state.missing_rewards += 1
            state.notices.note(f"{SampleName(sample)} is not trained on", f"{sample.metadata[MISSING_REWARD]} had none")
            if evaluation:
                sample.reward = None
