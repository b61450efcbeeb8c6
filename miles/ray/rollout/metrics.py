"""What a rollout or an evaluation looked like, in numbers. Pure functions; no ray, no torch.

Keys under `rollout/`, `perf/`, `passrate/` and `eval/`. The set of keys depends on the flags and on what the engines
report, never on how a batch turned out, except for `rollout/zero_std/count_<reward>`.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

from miles.ray.rollout.rewards import groups_by_index
from miles.utils.types import Sample

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

T = TypeVar("T")

REPETITION_TAIL_CHARS = 4096
REPETITION_COMPRESSION_RATIO = 10.0


def rollout_metrics(
    args: Namespace,
    samples: Sequence[Sample],
    *,
    raw_rewards: Sequence[float] | None = None,
    rollout_time: float | None = None,
    num_trimmed: int = 0,
) -> dict[str, float]:
    """Metrics of the samples that go to the trainer.

    `raw_rewards` is the column `raw_reward` of the train data. Where it is None, or has another length because a custom
    conversion made other samples, the samples' own rewards are used. Samples whose reward function had none count in no
    mean of rewards; `missing_rewards` says how many they are (with `--missing-reward remove`). `rollout_time` is the
    wall time of the rollout call in seconds; without it the `perf/` keys that need it are left out. `num_trimmed`
    samples were cut off to fit the global batch size.
    """
    if not samples:
        raise ValueError("metrics: the rollout has no samples")
    if raw_rewards is not None and len(raw_rewards) == len(samples):
        rewards = list(raw_rewards)
    else:
        rewards = [_number(sample.get_reward_value(args)) for sample in samples]
    told = [None if sample.reward_is_placeholder else r for r, sample in zip(rewards, samples, strict=True)]
    groups = _reward_groups(told, samples, getattr(args, "n_samples_per_prompt", 1))
    reward_groups = [told_rewards for group in groups if (told_rewards := [r for r in group if r is not None])]
    metrics: dict[str, float] = {
        "rollout/num_groups": len(groups),
        "rollout/num_samples": len(samples),
        "rollout/trimmed_samples": num_trimmed,
        "rollout/raw_reward": fmean(r for group in reward_groups for r in group) if reward_groups else 0.0,
        **_prefixed("rollout/", sample_statistics(samples)),
        **_prefixed("rollout/zero_std/", zero_std_counts(reward_groups)),
        **_prefixed("rollout/", prefix_cache(samples)),
        **_prefixed("rollout/weight_version/", weight_versions(samples)),
        **_prefixed("perf/", throughput(args, samples, rollout_time)),
    }
    if getattr(args, "missing_reward", "error") == "remove":
        metrics["rollout/missing_rewards"] = sum(sample.reward_is_placeholder for sample in samples)
    if getattr(args, "log_passrate", False):
        metrics |= _prefixed("passrate/", pass_rates(reward_groups))
    return metrics


def eval_metrics(args: Namespace, data: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of an evaluation: `data` maps each data set's name to its `rewards` and, where they are known,
    `truncated` and `samples` lists.

    `eval/<name>` is the mean reward; a missing or NaN reward counts as 0 and in `eval/<name>-none_reward_ratio`.
    `eval/<name>-pass@k` comes with --log-passrate, over groups of the samples' `group_index` or, without one, runs of
    --n-samples-per-eval-prompt.
    """
    metrics: dict[str, float] = {}
    for name, result in data.items():
        raw = list(result["rewards"])
        if not raw:
            raise ValueError(f"eval data set {name!r}: no rewards; is the data set empty?")
        rewards = [_number(value) for value in raw]
        metrics[f"eval/{name}"] = fmean(rewards)
        metrics[f"eval/{name}-none_reward_ratio"] = fmean(_is_missing(value) for value in raw)
        samples = result.get("samples")
        statistics_of_samples = sample_statistics(samples) if samples else {}
        truncated_ratio = statistics_of_samples.pop("truncated_ratio", None)
        if result.get("truncated"):
            truncated_ratio = fmean(bool(value) for value in result["truncated"])
        if truncated_ratio is not None:
            metrics[f"eval/{name}-truncated_ratio"] = truncated_ratio
        metrics |= _prefixed(f"eval/{name}/", statistics_of_samples)
        if getattr(args, "log_passrate", False):
            groups = _reward_groups(rewards, samples, getattr(args, "n_samples_per_eval_prompt", 1))
            metrics |= _prefixed(f"eval/{name}-", pass_rates(groups))
    return metrics


def sample_statistics(samples: Sequence[Sample]) -> dict[str, float]:
    """Length, truncation and repetition. `response_len` counts the tokens that are trained on: neither tool output
    nor padding."""
    return {
        **_prefixed("response_len/", statistics([sample.effective_response_length for sample in samples])),
        "truncated_ratio": fmean(sample.status is Sample.Status.TRUNCATED for sample in samples),
        "repetition_frac": fmean(is_repetitive(sample.response) for sample in samples),
    }


def zero_std_counts(reward_groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Groups of at least two samples whose rewards are all equal, in total and by reward (rounded to one decimal):
    nothing is learned from them."""
    flat = [group[0] for group in reward_groups if len(group) > 1 and all(r == group[0] for r in group)]
    by_reward = Counter(round(reward, 1) + 0.0 for reward in flat)
    return {"count": len(flat), **{f"count_{reward}": count for reward, count in sorted(by_reward.items())}}


def prefix_cache(samples: Sequence[Sample]) -> dict[str, float]:
    """How much of the prompts the engines found in their prefix cache (0 where they do not say)."""
    cached = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
    prompt = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    return {
        "prefix_cache_hit_rate": cached / prompt if prompt else 0.0,
        "avg_cached_tokens_per_sample": cached / len(samples),
    }


def weight_versions(samples: Sequence[Sample]) -> dict[str, float]:
    """The oldest version that wrote a part of each sample, and the share of samples that several versions wrote.

    Samples without a numeric version do not count for the former; where there is none at all its keys are left out.
    """
    oldest = [version for sample in samples if (version := sample.oldest_weight_version) is not None]
    mixed = fmean(len({str(version) for version in sample.weight_versions}) > 1 for sample in samples)
    return {**(statistics(oldest) if oldest else {}), "mixed_version_ratio": mixed}


def throughput(args: Namespace, samples: Sequence[Sample], rollout_time: float | None) -> dict[str, float]:
    """Tokens per second and GPU of the rollout call; one CPU engine counts as a GPU. `effective` counts only tokens
    that are trained on."""
    metrics = _prefixed("non_generation_time/", statistics([sample.non_generation_time for sample in samples]))
    if rollout_time is None:
        return metrics
    metrics["rollout_time"] = rollout_time
    if rollout_time > 0:
        gpus = getattr(args, "rollout_num_gpus", None) or 1
        lengths = [sample.response_length for sample in samples]
        effective = sum(sample.effective_response_length for sample in samples)
        metrics["tokens_per_gpu_per_sec"] = sum(lengths) / rollout_time / gpus
        metrics["effective_tokens_per_gpu_per_sec"] = effective / rollout_time / gpus
        metrics["longest_sample_tokens_per_sec"] = max(lengths) / rollout_time
    return metrics


def pass_rates(reward_groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ... up to the size of the largest group: the chance that one of k answers to a prompt
    is right (a reward of 1 or more), averaged over the groups with at least k answers.

    Of n answers with c right ones the unbiased estimate is 1 - C(n - c, k) / C(n, k).
    Chen et al., Evaluating Large Language Models Trained on Code (2021), equation 1.
    """
    rates: dict[str, float] = {}
    k = 1
    while any(len(group) >= k for group in reward_groups):
        chances = [
            1 - math.comb(len(group) - sum(reward >= 1 for reward in group), k) / math.comb(len(group), k)
            for group in reward_groups
            if len(group) >= k
        ]
        rates[f"pass@{k}"] = fmean(chances)
        k *= 2
    return rates


def is_repetitive(text: str) -> bool:
    """Whether the end of a long text says the same over and over: its last 4,096 characters shrink more than tenfold
    (prose shrinks two- to threefold). Shorter texts never count."""
    if len(text) < REPETITION_TAIL_CHARS:
        return False
    tail = text[-REPETITION_TAIL_CHARS:].encode("utf-8", errors="surrogatepass")
    return len(tail) / len(zlib.compress(tail, 1)) > REPETITION_COMPRESSION_RATIO


def statistics(values: Sequence[float]) -> dict[str, float]:
    return {"mean": fmean(values), "median": median(values), "max": max(values), "min": min(values)}


def _reward_groups(rewards: Sequence[T], samples: Sequence[Sample] | None, group_size: int) -> list[Sequence[T]]:
    """Rewards by `group_index` where every sample has one, else runs of `group_size`; where those do not come out even,
    groups cannot be told apart and each sample counts for itself."""
    if samples and all(sample.group_index is not None for sample in samples):
        return [[rewards[i] for i in members] for members in groups_by_index(samples, group_size)]
    size = group_size if len(rewards) % group_size == 0 else 1
    return [rewards[start : start + size] for start in range(0, len(rewards), size)]


def _number(reward: Any) -> float:
    if isinstance(reward, dict):
        raise ValueError(
            f"metrics: a reward is a dictionary with the keys {sorted(reward)}; name the one to use with --reward-key "
            "(--eval-reward-key)"
        )
    return 0.0 if _is_missing(reward) else float(reward)


def _is_missing(reward: Any) -> bool:
    return reward is None or (isinstance(reward, float) and math.isnan(reward))


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in metrics.items()}
