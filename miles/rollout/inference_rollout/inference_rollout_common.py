"""Generation and reward of one sample and of one group, and the rollout function around them.

    group --generate_and_rm_group--> one task per sample (SampleRun): [slot] generate function --> reward
                                          |
                                          +-- user code fails: the siblings are cancelled and settled, its error raised
                                          +-- transport, deadline, abort: this sample alone is generated again

A slot of `GenerateState.generate_fn_semaphore` is held for a whole trajectory (all turns of it); rewards are computed
outside of it. Importing this module is light: the tokenizer and its libraries are loaded on first use.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from miles.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalOutput,
    RolloutFnInput,
    RolloutFnOutput,
    RolloutFnTrainOutput,
)
from miles.rollout.generate_hub import single_turn
from miles.rollout.generate_utils.generate_endpoint_utils import ensure_routing_key
from miles.rollout.inference_rollout.compatibility import SampleName, load_generate_function
from miles.rollout.inference_rollout.deadlines import DeadlineConfig, GroupClock
from miles.rollout.inference_rollout.notices import Notices
from miles.rollout.inference_rollout.sample_failures import is_aborted, members, too_stale
from miles.rollout.inference_rollout.sample_run import SampleRun, count_missing_rewards, reward_in_time
from miles.rollout.inference_rollout.sibling_tasks import gather_or_cancel
from miles.rollout.rm_hub import batched_async_rm
from miles.utils.timeline import BusyIntervals
from miles.utils.turns import Turns
from miles.utils.types import Sample

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from miles.rollout.generate_utils.attempts import AttemptLog

Group = list["Sample | list[Sample]"]
logger = logging.getLogger(__name__)


class GenerateState:
    """What all generation of one rollout function shares: slots, sampling parameters, tokenizer, the abort flag.

    Training and evaluation have one each. `busy` records when at least one slot was held, `attempts`, where whoever
    writes a trace has set it, each attempt at a sample. `aborted` makes samples that
    have not started yet return ABORTED, and nothing be replaced; `reset` clears it.

    Counted here, and never set back: `sample_retries` (samples generated again alone), `sample_timeouts` (deadlines
    that passed), `missing_rewards` (samples taken out by `--missing-reward remove`).
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.generate_fn_semaphore = asyncio.Semaphore(max_concurrent_samples(args))
        self.sampling_params = compute_sampling_params(
            args,
            temperature=getattr(args, "rollout_temperature", 1.0),
            top_p=getattr(args, "rollout_top_p", 1.0),
            top_k=getattr(args, "rollout_top_k", -1),
            max_new_tokens=getattr(args, "rollout_max_response_len", None),
        )
        custom = load_generate_function(getattr(args, "custom_generate_function_path", None))
        self.generate_function: Any = custom or single_turn.generate
        self.aborted = False
        self.busy = BusyIntervals()
        self.attempts: AttemptLog | None = None
        self.starts = Turns()  # of groups, and of attempts at samples
        self.deadlines = DeadlineConfig.from_args(args)
        self.sample_max_retries: int = getattr(args, "sample_max_retries", 0)
        self.max_weight_staleness: int | None = getattr(args, "max_weight_staleness", None)
        self.weight_version: int | None = None
        self.sample_retries = 0
        self.sample_timeouts = 0
        self.missing_rewards = 0
        self.notices = Notices()
        self._functions_by_path: dict[str, Any] = {}

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of `--hf-checkpoint`, loaded on first use."""
        from miles.utils.processing_utils import load_tokenizer

        return load_tokenizer(
            self.args.hf_checkpoint, chat_template_path=getattr(self.args, "chat_template_path", None)
        )

    @cached_property
    def processor(self) -> Any:
        """The multimodal processor of `--hf-checkpoint`; None where it has none."""
        from miles.utils.processing_utils import load_processor

        return load_processor(self.args.hf_checkpoint)

    def reset(self) -> None:
        self.aborted = False

    def still_usable(self, samples: Sequence[Sample]) -> bool:
        """Whether finished samples are worth keeping for siblings that must be generated again now.

        No sample may be older than `--max-weight-staleness` allows at `weight_version`, which whoever learns of a
        weight update sets. An owner with an order of versions of its own replaces this method on its instance.
        """
        return not too_stale(samples, self.weight_version, self.max_weight_staleness)

    def generate_function_for(self, sample: Sample) -> Any:
        """The sample's own generate function where it names one, else the run's."""
        path = sample.generate_function_path
        if path is None:
            return self.generate_function
        if path not in self._functions_by_path:
            self._functions_by_path[path] = load_generate_function(path)
        return self._functions_by_path[path]


def max_concurrent_samples(args: Namespace) -> int:
    """Generation slots, in samples: `sglang_server_concurrency * rollout_num_gpus // rollout_num_gpus_per_engine`, at
    least 1. Without a GPU count one engine is assumed."""
    gpus_per_engine = getattr(args, "rollout_num_gpus_per_engine", None) or 1
    gpus = getattr(args, "rollout_num_gpus", None) or gpus_per_engine
    concurrency = getattr(args, "sglang_server_concurrency", None) or 512
    return max(1, concurrency * gpus // gpus_per_engine)


def compute_sampling_params(
    args: Namespace, *, temperature: float, top_p: float, top_k: int, max_new_tokens: int | None
) -> dict[str, Any]:
    """The engine's sampling parameters: the four given ones, and stop conditions and detokenisation from the flags."""
    return {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        "stop": getattr(args, "rollout_stop", None),
        "stop_token_ids": getattr(args, "rollout_stop_token_ids", None),
        "skip_special_tokens": getattr(args, "rollout_skip_special_tokens", False),
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


async def generate_and_rm(
    state: GenerateState,
    sample: Sample | list[Sample],
    sampling_params: dict[str, Any],
    evaluation: bool = False,
) -> Sample | list[Sample]:
    """Answer one sample and reward the answer (the reward waits for the group with `--group-rm`).

    A finished sample comes back untouched. A sample that starts while the state is aborted comes back ABORTED. A sample
    whose generation was aborted, FAILED, lost its connection or passed its deadline is generated again, at most
    `--sample-max-retries` times, and comes back ABORTED and without a reward where that did not help. A list comes back
    where the generate function made several samples of one, and a list that comes in must be finished. Errors of
    plug-ins are raised as they are.
    """
    if _is_finished(state, sample):
        return sample
    assert isinstance(sample, Sample)
    return await SampleRun(state, sample, sampling_params, evaluation, GroupClock(state.deadlines)).run()


def _is_finished(state: GenerateState, sample: Sample | list[Sample]) -> bool:
    """Whether the sample has its answer already. One that has not is made ready for generation."""
    args = state.args
    if isinstance(sample, list) or sample.status.is_finished:
        _check_finished(sample, needs_reward=not getattr(args, "group_rm", False))
        return True
    if getattr(args, "partial_rollout", False) and getattr(args, "mask_offpolicy_in_partial_rollout", False):
        _mask_earlier_tokens(sample)
    return False


def _check_finished(sample: Sample | list[Sample], *, needs_reward: bool) -> None:
    for member in members(sample):
        if not member.status.is_finished:
            raise ValueError(
                f"sample {member.index} is one of several made from one prompt and is {member.status.value}: "
                "such a trajectory cannot be continued, generate its prompt again"
            )
        if needs_reward and member.reward is None:
            raise ValueError(f"sample {member.index} is {member.status.value} but has no reward")


def _mask_earlier_tokens(sample: Sample) -> None:
    if sample.response_length > 0:
        sample.loss_mask = [0] * sample.response_length


async def generate_and_rm_group(
    state: GenerateState,
    group: list[Sample],
    sampling_params: dict[str, Any],
    evaluation: bool = False,
    sample_done_callback: Callable[[], None] | None = None,
) -> list[Sample]:
    """Answer and reward the samples of one prompt side by side; the result has as many members, in the same order.

    Returns the group at once where the state is aborted. What user code raises cancels and settles the siblings, and is
    raised. Anything else that goes wrong with a sample concerns this sample alone, see `generate_and_rm`; it is not
    generated again where that would meet siblings that are too old by then (`GenerateState.still_usable`), for these
    would have to be generated again, too. With `--group-rm` the whole group is rewarded at the end, unless one of its
    samples was aborted.

    `sample_done_callback` is called exactly once for each member, without arguments and on the loop, as soon as the
    member needs no generation slot any more: it has its answer and has freed its slot (rewards come after that), or it
    has failed, was cancelled, or was not generated at all. All calls have been made when this returns or raises.
    """
    return await _GroupRun(state, group, sampling_params, evaluation, sample_done_callback).run()


class _GroupRun:
    """The members of one group in generation, and what each still owes to the callback."""

    def __init__(
        self,
        state: GenerateState,
        group: list[Sample],
        sampling_params: dict[str, Any],
        evaluation: bool,
        sample_done_callback: Callable[[], None] | None,
    ) -> None:
        self._state = state
        self._group = group
        self._sampling_params = sampling_params
        self._evaluation = evaluation
        self._callback = sample_done_callback
        self._unreported = set(range(len(group)))
        self._clock = GroupClock(state.deadlines)
        self._runs: list[SampleRun] = []

    async def run(self) -> list[Sample]:
        try:
            return self._group if self._state.aborted else await self._answer()
        finally:
            for i in list(self._unreported):  # what was cancelled before it began
                self._report(i)

    async def _answer(self) -> list[Sample]:
        state = self._state
        if not state.starts.take():
            await state.starts.wait()
        for member in self._group:
            for sample in members(member):
                ensure_routing_key(state.args, sample)
        results: Any = await gather_or_cancel(
            (self._answer_one(i, sample) for i, sample in enumerate(self._group)), map(SampleName, self._group)
        )
        if getattr(state.args, "group_rm", False) and not await self._reward(results):
            for sample in flatten(results):
                sample.status = Sample.Status.ABORTED
        return list(results)

    async def _answer_one(self, i: int, sample: Sample) -> Sample | list[Sample]:
        if _is_finished(self._state, sample):
            return sample
        run = SampleRun(
            self._state,
            sample,
            _seeded(self._state.args, self._sampling_params, i),
            self._evaluation,
            self._clock,
            may_retry=self._may_retry,
            on_generated=partial(self._report, i),
        )
        self._runs.append(run)
        return await run.run()

    def _report(self, i: int) -> None:
        if i in self._unreported:
            self._unreported.remove(i)
            if self._callback is not None:
                self._callback()

    def _may_retry(self) -> bool:
        finished = [run.generated for run in self._runs if run.generated is not None]
        return self._state.still_usable(flatten(finished))

    async def _reward(self, group: Group) -> bool:
        """Reward the whole group; False where the group's deadline came first."""
        if is_aborted(flatten(group)):
            return True
        if await reward_in_time(self._state, self._clock, lambda: _reward_group(self._state, group)):
            return True
        self._state.notices.note(f"group {flatten(group)[0].group_index} is given up", "no reward in time")
        return False


def flatten(group: Group) -> list[Sample]:
    """The samples of a group, those of members that became several included."""
    return [sample for member in group for sample in members(member)]


def _seeded(args: Namespace, sampling_params: dict[str, Any], i: int) -> dict[str, Any]:
    """`sampling_params`, with a seed of its own for the i-th sample of a group in deterministic mode."""
    if not getattr(args, "sglang_enable_deterministic_inference", False):
        return sampling_params
    return {**sampling_params, "sampling_seed": getattr(args, "rollout_seed", 42) + i}


async def _reward_group(state: GenerateState, group: Group) -> None:
    samples = flatten(group)
    rewards = await batched_async_rm(state.args, samples)
    if not isinstance(rewards, list) or len(rewards) != len(samples):
        raise ValueError(f"--group-rm: {len(samples)} samples need a list of as many rewards, got {rewards!r}")
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
    count_missing_rewards(state, samples)


class InferenceRolloutFn:
    """The standard rollout function: a batch per training call, all eval data sets per eval call.

    Groups that are not used go back to the data source, which hands them out first next time.
    """

    def __init__(self, input: RolloutFnConstructorInput, state: GenerateState | None = None) -> None:
        self.args = input.args
        self.data_source = input.data_source
        self.state = state or GenerateState(input.args)
        self.eval_prompt_dataset_cache: dict[Any, Any] = {}

    async def __call__(self, input: RolloutFnInput) -> RolloutFnOutput:
        if input.evaluation:
            return RolloutFnEvalOutput(data=await self._eval(getattr(input, "generate_state", None)))
        return await self._train(input.rollout_id)

    async def _train(self, rollout_id: int) -> RolloutFnTrainOutput:
        from miles.rollout.inference_rollout.inference_rollout_train import generate_rollout_async

        output, unused = await generate_rollout_async(self.state, rollout_id, self.data_source.get_samples)
        if unused:
            self._give_back(unused)
        return output

    def _give_back(self, groups: list[list[Sample]]) -> None:
        try:
            self.data_source.add_samples(groups)
        except NotImplementedError:
            logger.warning(
                "%d unused prompt groups are dropped: %s takes none back (see --data-source-path)",
                len(groups),
                type(self.data_source).__name__,
            )

    async def _eval(self, own_state: GenerateState | None) -> dict[str, dict[str, Any]]:
        """`own_state`: of engines that only evaluate; what goes wrong there concerns one evaluation, not the run."""
        from miles.rollout.inference_rollout.eval_progress import EvalProgress
        from miles.rollout.inference_rollout.inference_rollout_eval import eval_rollout

        if own_state is not None:
            return await eval_rollout(own_state, self.eval_prompt_dataset_cache)
        progress = EvalProgress.from_args(self.args)
        evaluating = eval_rollout(self.state, self.eval_prompt_dataset_cache, progress)
        return await progress.watch(evaluating, self.args)
