"""Generation and reward of one sample and of one group, and the rollout function around them.

    group --generate_and_rm_group--> one task per sample --generate_and_rm--> [slot] generate function --> reward
                                          |
                                          +-- one fails: the siblings are cancelled and settled, its error is raised

A slot of `GenerateState.generate_fn_semaphore` is held for a whole trajectory (all turns of it); rewards are computed
outside of it. Importing this module is light: the tokenizer and its libraries are loaded on first use.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

from miles.rollout.base_types import (
    GenerateFnInput,
    RolloutFnConstructorInput,
    RolloutFnEvalOutput,
    RolloutFnInput,
    RolloutFnOutput,
    RolloutFnTrainOutput,
)
from miles.rollout.generate_hub import single_turn
from miles.rollout.generate_utils.generate_endpoint_utils import ensure_routing_key
from miles.rollout.inference_rollout.compatibility import call_generate_function, load_generate_function
from miles.rollout.inference_rollout.sibling_tasks import gather_or_cancel
from miles.rollout.rm_hub import async_rm, batched_async_rm
from miles.utils.data import private_copy
from miles.utils.timeline import BusyIntervals
from miles.utils.types import Sample

if TYPE_CHECKING:
    from argparse import Namespace

Group = list["Sample | list[Sample]"]
logger = logging.getLogger(__name__)


class GenerateState:
    """What all generation of one rollout function shares: slots, sampling parameters, tokenizer, the abort flag.

    Training and evaluation have one each. `busy` records when at least one slot was held. `aborted` makes samples that
    have not started yet return ABORTED; `reset` clears it.
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

    A finished sample comes back untouched. A sample that starts while the state is aborted comes back ABORTED, as does
    one whose generation was aborted; neither is rewarded. A list comes back where the generate function made several
    samples of one, and a list that comes in must be finished. Errors of plug-ins are raised as they are.
    """
    args = state.args
    group_rm = getattr(args, "group_rm", False)
    if isinstance(sample, list) or sample.status.is_finished:
        _check_finished(sample, needs_reward=not group_rm)
        return sample
    if getattr(args, "partial_rollout", False) and getattr(args, "mask_offpolicy_in_partial_rollout", False):
        _mask_earlier_tokens(sample)

    async with state.generate_fn_semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        with state.busy:
            own_params = {name: private_copy(value) for name, value in sampling_params.items()}
            input = GenerateFnInput(state=state, sample=sample, sampling_params=own_params, evaluation=evaluation)
            generated = await call_generate_function(state.generate_function_for(sample), input)

    members = generated if isinstance(generated, list) else [generated]
    if group_rm or any(member.status is Sample.Status.ABORTED for member in members):
        return generated
    if isinstance(generated, list):
        unrewarded = [member for member in generated if member.reward is None]
        if unrewarded:
            await batched_async_rm(args, unrewarded, inplace_set_reward_field=True)
    elif generated.reward is None:
        generated.reward = await async_rm(args, generated)
    return generated


def _check_finished(sample: Sample | list[Sample], *, needs_reward: bool) -> None:
    for member in sample if isinstance(sample, list) else [sample]:
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
    state: GenerateState, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """Answer and reward the samples of one prompt side by side; the result has as many members, in the same order.

    Returns the group at once where the state is aborted. A failing sample cancels and settles its siblings, and its
    error is raised. With `--group-rm` the whole group is rewarded at the end, unless one of its samples was aborted.
    """
    if state.aborted:
        return group
    args = state.args
    for member in group:
        for sample in member if isinstance(member, list) else [member]:
            ensure_routing_key(args, sample)

    results: Any = await gather_or_cancel(
        generate_and_rm(state, sample, _seeded(args, sampling_params, i), evaluation=evaluation)
        for i, sample in enumerate(group)
    )
    if getattr(args, "group_rm", False):
        await _reward_group(args, results)
    return list(results)


def _seeded(args: Namespace, sampling_params: dict[str, Any], i: int) -> dict[str, Any]:
    """`sampling_params`, with a seed of its own for the i-th sample of a group in deterministic mode."""
    if not getattr(args, "sglang_enable_deterministic_inference", False):
        return sampling_params
    return {**sampling_params, "sampling_seed": getattr(args, "rollout_seed", 42) + i}


async def _reward_group(args: Namespace, group: Group) -> None:
    samples = [s for member in group for s in (member if isinstance(member, list) else [member])]
    if any(sample.status is Sample.Status.ABORTED for sample in samples):
        return
    rewards = await batched_async_rm(args, samples)
    if not isinstance(rewards, list) or len(rewards) != len(samples):
        raise ValueError(f"--group-rm: {len(samples)} samples need a list of as many rewards, got {rewards!r}")
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


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
            return await self._eval(getattr(input, "generate_state", None) or self.state)
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

    async def _eval(self, state: GenerateState) -> RolloutFnEvalOutput:
        from miles.rollout.inference_rollout.inference_rollout_eval import eval_rollout

        return RolloutFnEvalOutput(data=await eval_rollout(state, self.eval_prompt_dataset_cache))
