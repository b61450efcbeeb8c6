"""Which reward a sample gets: its own function or type, else the run's.

sample.reward_spec.custom_rm_path, else --custom-rm-path  -> the user's function
sample.reward_spec.rm_type, else metadata["rm_type"], else --rm-type  -> a type of the registry below
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import TYPE_CHECKING, Any

from miles.rollout.rm_hub.deepscaler import deepscaler_reward
from miles.rollout.rm_hub.f1 import f1_score
from miles.rollout.rm_hub.gpqa import compute_gpqa_reward
from miles.rollout.rm_hub.math_dapo_utils import compute_score
from miles.rollout.rm_hub.math_utils import extract_boxed_answer, math_reward
from miles.rollout.rm_hub.remote import remote_rm
from miles.rollout.rm_hub.validation import check_reward, check_reward_list
from miles.utils.misc import load_function
from miles.utils.user_calls import UserCode, call_user

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Callable, Sequence

    from miles.utils.types import Sample

    RewardFn = Callable[[Namespace, Sample, str], Awaitable[Any]]

_BOXED_PREFIX = "boxed_"

_REFUSED = {
    "gemma_math": "its answer format is not documented; use --rm-type math, or your own function in --custom-rm-path",
    "ifbench": "it needs the IFBench checkers, which are no installable package; call them from --custom-rm-path",
}


async def _remote(args: Namespace, sample: Sample, response: str) -> Any:
    return await remote_rm(args, sample, response)


async def _math(args: Namespace, sample: Sample, response: str) -> int:
    return await math_reward(response, sample.label)


async def _deepscaler(args: Namespace, sample: Sample, response: str) -> int:
    return await deepscaler_reward(response, sample.label)


async def _dapo(args: Namespace, sample: Sample, response: str) -> dict[str, Any]:
    return compute_score(response, sample.label)


async def _f1(args: Namespace, sample: Sample, response: str) -> float:
    return f1_score(response, sample.label)[0]


async def _gpqa(args: Namespace, sample: Sample, response: str) -> float:
    return compute_gpqa_reward(response, sample.label, sample.metadata)


async def _random(args: Namespace, sample: Sample, response: str) -> int:
    return random.randint(0, 1)


async def _deterministic_random(args: Namespace, sample: Sample, response: str) -> int:
    """0 or 1, the same for the same prompt and response in every process."""
    return hashlib.sha256(f"{sample.prompt}\n{response}".encode()).digest()[0] & 1


_REWARDS: dict[str, RewardFn] = {
    "remote_rm": _remote,
    "math": _math,
    "deepscaler": _deepscaler,
    "dapo": _dapo,
    "f1": _f1,
    "gpqa": _gpqa,
    "random": _random,
    "deterministic_random": _deterministic_random,
}


def known_rm_types() -> list[str]:
    """The values of `--rm-type`; each also with the prefix "boxed_", which rewards what the last box contains."""
    return sorted(_REWARDS)


def check_rm_type(rm_type: str | None) -> None:
    """Raise ValueError where `rm_type` is none that `async_rm` knows, listing those."""
    _reward_function(rm_type)


async def async_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Any:
    """The reward of one sample: a number, or a dict of them (the run's `--reward-key` chooses one).

    Raises ValueError for an unknown type, and for a reward that is neither. What a custom function raises comes
    through.
    """
    path = _custom_path(args, sample)
    if path:
        reward = await _call(path, args, sample, **kwargs)
        return check_reward(reward, path, sample, args)
    rm_type = _rm_type(args, sample)
    boxed, reward_fn = _reward_function(rm_type)
    response = (extract_boxed_answer(sample.response) or "") if boxed else sample.response
    return check_reward(await reward_fn(args, sample, response), f"--rm-type {rm_type}", sample, args)


async def batched_async_rm(
    args: Namespace, samples: Sequence[Sample], inplace_set_reward_field: bool = False, **kwargs: Any
) -> list[Any]:
    """The rewards of `samples`, in order. A custom function is called once, with the list.

    With `inplace_set_reward_field` they are also stored in the samples, none of which may have a reward yet.
    """
    if inplace_set_reward_field and (rewarded := [sample.index for sample in samples if sample.reward is not None]):
        raise ValueError(f"batched_async_rm: samples {rewarded} have a reward already")
    rewards = await _batch_rewards(args, samples, **kwargs)
    if inplace_set_reward_field:
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward = reward
    return rewards


async def _batch_rewards(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    paths = {_custom_path(args, sample) for sample in samples}
    path = paths.pop() if len(paths) == 1 else None
    if path:
        rewards = await _call(path, args, list(samples), **kwargs)
        return check_reward_list(rewards, path, samples, args)
    tasks = [asyncio.create_task(async_rm(args, sample, **kwargs)) for sample in samples]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:  # a failing reward cancels and settles the others
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


async def _call(path: str, args: Namespace, samples: Any, **kwargs: Any) -> Any:
    fn = load_function(path)
    with UserCode("reward function", fn, _Rewarded(samples)):
        return await call_user(fn, args, samples, **kwargs)


class _Rewarded:
    """Names the sample, or the samples, of one call."""

    def __init__(self, samples: Sample | list[Sample]) -> None:
        self._samples = samples

    def __str__(self) -> str:
        if isinstance(self._samples, list):
            return f"samples {[sample.index for sample in self._samples]}"
        return f"sample {self._samples.index} of group {self._samples.group_index}"


def _custom_path(args: Namespace, sample: Sample) -> str | None:
    own = sample.reward_spec.custom_rm_path if sample.reward_spec is not None else None
    return own or getattr(args, "custom_rm_path", None)


def _rm_type(args: Namespace, sample: Sample) -> str | None:
    own = sample.reward_spec.rm_type if sample.reward_spec is not None else None
    in_metadata = sample.metadata.get("rm_type") if isinstance(sample.metadata, dict) else None
    return own or in_metadata or getattr(args, "rm_type", None)


def _reward_function(rm_type: str | None) -> tuple[bool, RewardFn]:
    """(whether only the boxed answer counts, the function) for a type."""
    name = (rm_type or "").strip()
    known = f"known types: {', '.join(known_rm_types())}, each also as {_BOXED_PREFIX}<type>"
    if not name:
        raise ValueError(f"no reward: set --rm-type, --custom-rm-path or metadata['rm_type'] ({known})")
    base = name.removeprefix(_BOXED_PREFIX)
    if base in _REFUSED:
        raise ValueError(f"--rm-type {name} is not available: {_REFUSED[base]} ({known})")
    if base not in _REWARDS:
        raise ValueError(f"--rm-type {name!r} is unknown; {known}")
    return base != name, _REWARDS[base]
