"""One training batch: over-sampling, dynamic filters, and an abort of what is still running at the end.

    get_samples --groups--> generate_and_rm_group tasks --finished--> dynamic filter --kept--> the batch
         ^                            |                                    |
         |                            +-- unfinished at the end: aborted   +-- rejected: dropped, counted by reason
         +------------ given back ----+-- finished beyond the batch, or aborted by an engine

While kept + running groups are fewer than the batch, `over_sampling_batch_size` more are submitted. A task that raises
fails the step with its own error, after everything else has been settled. Where the data source has no more groups,
those that were aborted start again, and the batch is what has been kept in the end.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from miles.rollout.base_types import EndOfData, RolloutFnTrainOutput
from miles.rollout.filter_hub.base_types import NO_REASON, MetricGatherer, acall_dynamic_filter
from miles.rollout.filter_hub.sample_filter import apply_sample_filter
from miles.rollout.inference_rollout.compatibility import shorten
from miles.rollout.inference_rollout.engine_aborts import get_worker_urls
from miles.rollout.inference_rollout.inference_rollout_common import generate_and_rm_group
from miles.rollout.inference_rollout.sample_failures import is_unanswered
from miles.rollout.inference_rollout.sibling_tasks import cancel_and_settle, failure_of
from miles.utils.http_utils import HttpRequestError, post
from miles.utils.misc import call_agent_abort_hook, load_function
from miles.utils.types import Sample

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState, Group

    GetSamples = Callable[[int], list[list[Sample]]]

logger = logging.getLogger(__name__)

ABORT_REPEAT_SECS = 3.0
"""Seconds between two rounds of abort requests while groups are still running."""

MAX_ABORTED_BATCHES = 8
"""Aborted groups in a row, in batches, after which a rollout gives up."""


def submit_generate_tasks(state: GenerateState, samples: list[list[Sample]]) -> list[asyncio.Task[Any]]:
    """One task per group, on the running loop; the caller owns them."""
    return [
        asyncio.create_task(generate_and_rm_group(state, group, state.sampling_params.copy(), evaluation=False))
        for group in samples
    ]


async def generate_rollout_async(
    state: GenerateState, rollout_id: int, data_source: GetSamples
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """The batch of step `rollout_id`, sorted by index, and the groups that were started but are not in it.

    With `--partial-rollout` those keep what was generated of them; otherwise they start over.
    """
    return await _BatchCollection(state, rollout_id, data_source).run()


class _BatchCollection:
    """The groups of one step: running, kept, rejected and unused."""

    def __init__(self, state: GenerateState, rollout_id: int, get_samples: GetSamples) -> None:
        args = state.args
        self.state = state
        self.args = args
        self.rollout_id = rollout_id
        self._get_samples = get_samples
        self._target: int = args.rollout_batch_size
        self._fetch: int = getattr(args, "over_sampling_batch_size", None) or self._target
        self._dynamic_filter = load_function(getattr(args, "dynamic_sampling_filter_path", None))
        self._sample_filter = load_function(getattr(args, "rollout_sample_filter_path", None))
        self._all_samples_process = load_function(getattr(args, "rollout_all_samples_process_path", None))
        self._metrics = MetricGatherer()
        self._prompts: dict[asyncio.Task[Any], list[Sample]] = {}
        self._kept: list[Group] = []
        self._finished: list[Group] = []
        self._unused: list[list[Sample]] = []
        self._aborted_in_a_row = 0

    async def run(self) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
        try:
            while len(self._kept) < self._target:
                self._submit()
                if not self._prompts:
                    break
                await self._sort_out(await _first_done(self._prompts))
            self._unused += await self._abort_rest()
        finally:
            await cancel_and_settle(list(self._prompts))
            self.state.reset()
        if not self._kept:
            raise EndOfData("the data source returned no groups, and none is left")
        is_last = len(self._kept) < self._target
        data = sorted(self._kept, key=_first_index)
        if self._sample_filter is not None:
            await apply_sample_filter(self._sample_filter, self.args, data, keeps_shape=False)
        if self._all_samples_process is not None:
            self._all_samples_process(self.args, sorted(self._finished, key=_first_index), self._get_samples)
        output = RolloutFnTrainOutput(samples=data, metrics=self._metrics.collect(), is_last=is_last)  # type: ignore[arg-type]
        return output, self._unused

    def _submit(self) -> None:
        """Start what the batch still lacks, as far as the data goes."""
        while len(self._kept) + len(self._prompts) < self._target:
            groups = self._get_samples(self._fetch)
            if not isinstance(groups, list):
                raise ValueError(
                    f"rollout {self.rollout_id}: the data source was asked for {self._fetch} groups and returned "
                    f"{shorten(groups)}; {len(self._kept)} of {self._target} groups are there"
                )
            if not groups:
                groups, self._unused = self._unused, []
            if not groups:
                return
            self._prompts.update(zip(submit_generate_tasks(self.state, groups), groups, strict=True))

    async def _sort_out(self, done: set[asyncio.Task[Any]]) -> None:
        """Decide on each finished group; the first error among them is raised."""
        ordered = [task for task in self._prompts if task in done]
        for task in ordered:
            if (failure := failure_of(task)) is not None:
                raise failure
        for task in ordered:
            prompts, group = self._prompts.pop(task), task.result()
            self._check_size(group)
            if has_aborted_sample(group):
                self._note_aborted()
                self._unused.append(self._for_reuse(prompts, group))
                continue
            self._aborted_in_a_row = 0
            self._finished.append(group)
            verdict = await acall_dynamic_filter(self._dynamic_filter, self.args, group)
            if not verdict.keep:
                self._metrics.on_dynamic_filter_drop(reason=verdict.reason or NO_REASON)
            elif len(self._kept) < self._target:
                self._kept.append(group)
            else:
                self._unused.append(self._for_reuse(prompts, group))

    def _note_aborted(self) -> None:
        """Raise RuntimeError where the engines answer nothing any more: more prompts would not help."""
        self._aborted_in_a_row += 1
        if self._aborted_in_a_row > MAX_ABORTED_BATCHES * self._target:
            raise RuntimeError(
                f"rollout {self.rollout_id}: the last {self._aborted_in_a_row} groups all came back aborted, with "
                f"{len(self._kept)} of {self._target} groups kept; the log says why ('is given up')"
            )
        logger.warning("rollout %d: a group was aborted and starts again", self.rollout_id)

    def _check_size(self, group: Group) -> None:
        expected = self.args.n_samples_per_prompt
        if len(group) != expected:
            raise ValueError(f"a group has {len(group)} members, --n-samples-per-prompt is {expected}")

    async def _abort_rest(self) -> list[list[Sample]]:
        """End what is still running; nothing of it is lost. An error of one of them fails the step."""
        await _abort_until_settled(self.state, set(self._prompts))
        unused = []
        for task, prompts in list(self._prompts.items()):
            if (failure := failure_of(task)) is not None:
                raise failure
            del self._prompts[task]
            unused.append(self._for_reuse(prompts, task.result()))
        return unused

    def _for_reuse(self, prompts: list[Sample], group: Group) -> list[Sample]:
        return group_for_reuse(self.args, prompts, group, self.rollout_id)


async def abort(state: GenerateState, pendings: set[asyncio.Task[Any]], rollout_id: int) -> list[list[Sample]]:
    """Abort the groups that are still running and wait for them.

    Returns them, as far as they got, with `--partial-rollout`; otherwise nothing. Raises the first error among them
    once all have ended. The state stays aborted until `state.reset()`.
    """
    await _abort_until_settled(state, pendings)
    failure = next((f for f in map(failure_of, pendings) if f is not None), None)
    if failure is not None:
        raise failure
    if not getattr(state.args, "partial_rollout", False):
        return []
    groups = [task.result() for task in pendings]
    return [group_for_reuse(state.args, group, group, rollout_id) for group in groups]


async def _abort_until_settled(state: GenerateState, pendings: set[asyncio.Task[Any]]) -> None:
    """Mark the state aborted and ask the engines to abort, again and again until every task has ended.

    One round may not be enough: a request that is on its way while the engines abort arrives after it.
    """
    state.aborted = True
    running = {task for task in pendings if not task.done()}
    if not running:
        return
    await call_agent_abort_hook(state.args)
    while running:
        await _abort_engines(state.args)
        _, running = await asyncio.wait(running, timeout=ABORT_REPEAT_SECS)


async def _abort_engines(args: Namespace) -> None:
    """Ask every engine once. A router or an engine that does not answer is logged: the next round asks again."""
    try:
        urls = await get_worker_urls(args)
    except HttpRequestError as error:
        logger.warning("the router did not list its engines for the abort: %s", error)
        return
    results = await asyncio.gather(
        *(post(f"{url}/abort_request", {"abort_all": True}, max_retries=0) for url in urls), return_exceptions=True
    )
    for url, result in zip(urls, results, strict=True):
        if isinstance(result, Exception):
            logger.warning("engine %s did not take the abort request: %s", url, result)
        elif isinstance(result, BaseException):
            raise result


def group_for_reuse(args: Namespace, prompts: list[Sample], group: Group, rollout_id: int) -> list[Sample]:
    """A group that goes back to the data source.

    With `--partial-rollout` it is the group as far as it got, its samples marked with the step that began them. Without
    it, and where members became several samples (which cannot be continued), it is the prompts to be answered afresh.
    """
    flat = [member for member in group if isinstance(member, Sample)]
    if getattr(args, "partial_rollout", False) and len(flat) == len(group):
        for sample in flat:
            if sample.response_length > 0:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
        return flat
    for sample in prompts:
        sample.reset_for_retry()
    return prompts


def has_aborted_sample(group: Group) -> bool:
    """Whether any sample of the group, at any nesting, was aborted or has failed."""
    return any(
        has_aborted_sample(member) if isinstance(member, list) else is_unanswered(member)  # type: ignore[arg-type]
        for member in group
    )


async def _first_done(tasks: dict[asyncio.Task[Any], Any]) -> set[asyncio.Task[Any]]:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return done


def _first_index(group: Group) -> int:
    first: Any = group[0]
    while isinstance(first, list):
        first = first[0]
    return -1 if first.index is None else int(first.index)
