"""Evaluation: every prompt of every evaluation data set, answered `n_samples_per_eval_prompt` times.

All data sets run side by side and share the state's generation slots. A failing sample cancels and settles the rest of
the evaluation, and its error is raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.rollout.generate_utils.generate_endpoint_utils import ensure_routing_key
from miles.rollout.inference_rollout.eval_progress import EvalProgress
from miles.rollout.inference_rollout.inference_rollout_common import compute_sampling_params, generate_and_rm
from miles.rollout.inference_rollout.sibling_tasks import gather_or_cancel
from miles.rollout.prompt_data import eval_configs, load_eval_dataset
from miles.utils.data import copy_prompt
from miles.utils.types import Sample

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
    from miles.utils.data import Dataset
    from miles.utils.eval_config import EvalDatasetConfig


async def eval_rollout(
    state: GenerateState, prompt_dataset_cache: dict[Any, Dataset], progress: EvalProgress | None = None
) -> dict[str, dict[str, Any]]:
    """`{name: {"rewards", "truncated", "samples"}}` for each evaluation data set of the run. `progress` is told of each
    sample.

    Raises ValueError with `--group-rm`, which needs whole groups and is not available here.
    """
    args = state.args
    if getattr(args, "group_rm", False):
        raise ValueError("--group-rm rewards training groups; evaluation does not support it, set --eval-function-path")
    progress = progress or EvalProgress()
    results = await gather_or_cancel(
        eval_rollout_single_dataset(state, config, prompt_dataset_cache, progress) for config in eval_configs(args)
    )
    return {name: data for result in results for name, data in result.items()}


async def eval_rollout_single_dataset(
    state: GenerateState,
    dataset_cfg: EvalDatasetConfig,
    prompt_dataset_cache: dict[Any, Dataset],
    progress: EvalProgress | None = None,
) -> dict[str, dict[str, Any]]:
    """`{name: {"rewards", "truncated", "samples"}}`: one entry per sample, sorted by sample index.

    A reward is the sample's, or its `eval_reward_key` (else `reward_key`) entry.
    """
    args = state.args
    dataset = _cached_dataset(state, dataset_cfg, prompt_dataset_cache)
    sampling_params = eval_sampling_params(args, dataset_cfg)
    deterministic = getattr(args, "sglang_enable_deterministic_inference", False)
    seed = getattr(args, "rollout_seed", 42)

    progress = progress or EvalProgress()

    async def answer(sample: Sample, repeat: int) -> Sample | list[Sample]:
        params = {**sampling_params, "sampling_seed": seed + repeat} if deterministic else sampling_params
        with progress.of(dataset_cfg.name, sample):
            return await generate_and_rm(state, sample, params, evaluation=True)

    answered = await gather_or_cancel(answer(sample, repeat) for sample, repeat in _samples(args, dataset, dataset_cfg))
    samples = [s for member in answered for s in (member if isinstance(member, list) else [member])]
    samples.sort(key=lambda sample: -1 if sample.index is None else sample.index)
    reward_key = getattr(args, "eval_reward_key", None) or getattr(args, "reward_key", None)
    return {
        dataset_cfg.name: {
            "rewards": [_reward(sample, reward_key) for sample in samples],
            "truncated": [sample.status is Sample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
    }


def eval_sampling_params(args: Namespace, config: EvalDatasetConfig) -> dict[str, Any]:
    """The sampling parameters of one data set; its stop conditions and minimum length win over the run's."""
    params = compute_sampling_params(
        args,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_response_len,
    )
    for name in ("stop", "stop_token_ids", "min_new_tokens"):
        value = getattr(config, name)
        if value is not None:
            params[name] = value
    return params


def _samples(args: Namespace, dataset: Dataset, config: EvalDatasetConfig) -> list[tuple[Sample, int]]:
    """Fresh samples, numbered from 0, each with the number of its repetition."""
    result: list[tuple[Sample, int]] = []
    for group_index, prompt in enumerate(dataset.samples):
        for repeat in range(config.n_samples_per_eval_prompt):
            sample = copy_prompt(prompt)
            sample.group_index = group_index
            sample.index = len(result)
            sample.metadata = config.inject_metadata(sample.metadata)
            sample.generate_function_path = config.custom_generate_function_path
            ensure_routing_key(args, sample)
            result.append((sample, repeat))
    return result


def _reward(sample: Sample, reward_key: str | None) -> Any:
    if not reward_key or sample.reward is None:
        return sample.reward
    if not isinstance(sample.reward, dict) or reward_key not in sample.reward:
        raise ValueError(f"--eval-reward-key {reward_key!r}: sample {sample.index} has the reward {sample.reward!r}")
    return sample.reward[reward_key]


def _cached_dataset(state: GenerateState, config: EvalDatasetConfig, cache: dict[Any, Dataset]) -> Dataset:
    args = state.args
    template = (getattr(args, "apply_chat_template", False), getattr(args, "chat_template_path", None))
    key = (config.cache_key, args.hf_checkpoint, *template)
    if key not in cache:
        cache[key] = load_eval_dataset(args, config, state.tokenizer, state.processor)
    return cache[key]
