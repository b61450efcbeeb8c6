"""From the groups of a rollout to what each trainer rank gets. Pure functions; no ray, no torch.

    groups (any nesting) --flatten, trim--> samples --convert--> columns, one entry a sample --split--> one shard a rank

The columns are `tokens` (prompt + response ids), `total_lengths`, `response_lengths`, `rewards`, `raw_reward`,
`truncated` (1 | 0), `sample_indices`, `loss_masks` (one entry a response token), and, where the samples have them,
`rollout_log_probs`, `weight_versions`, `metadata` (the samples' `train_metadata`), `multimodal_train_inputs`,
`teacher_log_probs`, `opd_reverse_kl`, `rollout_routed_experts`, `rollout_indexer_topk`, `round_number`.

A step of the optimizer takes `global_batch_size` consecutive samples of the batch, so what the drain sorted first is
trained first; the samples of each step are spread over the ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from miles.backends.training_utils.balance import balanced_partition
from miles.ray.rollout.rewards import normalize_rewards
from miles.utils.misc import load_function
from miles.utils.types import Sample
from miles.utils.user_calls import UserCode

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

__all__ = [
    "args_of_last_batch",
    "convert_samples_to_train_data",
    "flatten_and_trim",
    "flatten_samples",
    "global_batch_size",
    "normalize_rewards",
    "split_train_data_by_dp",
]

TrainData = dict[str, Any]

_REQUIRED_KEYS = ("tokens", "response_lengths", "loss_masks", "rewards")
_PER_TOKEN_FIELDS = ("rollout_log_probs", "teacher_log_probs", "opd_reverse_kl")
_REPLAY_FIELDS = ("rollout_routed_experts", "rollout_indexer_topk")


def flatten_samples(groups: Any) -> Iterator[Sample]:
    """Every sample of arbitrarily nested lists, in order. Raises ValueError for anything else in them."""
    if isinstance(groups, Sample):
        yield groups
        return
    if not isinstance(groups, list | tuple):
        raise ValueError(f"a rollout must return (nested) lists of Sample, found {type(groups).__name__}")
    for member in groups:
        yield from flatten_samples(member)


def global_batch_size(args: Namespace) -> int:
    """Samples in one optimizer step, over all ranks: --global-batch-size, or what --num-steps-per-rollout makes of the
    rollout's size (without either, one step a rollout)."""
    size: int | None = getattr(args, "global_batch_size", None)
    if size is not None:
        return size
    steps = getattr(args, "num_steps_per_rollout", None) or 1
    return int(args.rollout_batch_size * args.n_samples_per_prompt // steps)


def flatten_and_trim(args: Namespace, groups: Any, *, dp_size: int = 1) -> tuple[list[Sample], int]:
    """The samples of a batch in order, and how many were cut off at its end (to be counted as dropped).

    Keeps a multiple of the global batch size, or with --use-dynamic-global-batch-size a multiple of `dp_size`; all of
    them with --disable-rollout-trim-samples. Only batches whose generate function returns several samples for one
    prompt, or that a hook has shortened, ever have something to cut off.

    Raises ValueError where nothing would be left.
    """
    samples = list(flatten_samples(groups))
    if getattr(args, "disable_rollout_trim_samples", False):
        return samples, 0
    dynamic = getattr(args, "use_dynamic_global_batch_size", False)
    unit = dp_size if dynamic else global_batch_size(args)
    kept = len(samples) // unit * unit
    if kept == 0:
        rule = f"the data-parallel size {dp_size}" if dynamic else f"--global-batch-size {unit}"
        raise ValueError(f"the rollout has {len(samples)} samples, fewer than {rule}: no training step is possible")
    return samples[:kept], len(samples) - kept


def args_of_last_batch(args: Namespace, num_samples: int, dp_size: int) -> Namespace | None:
    """The flags with which the last batch of the data, which is short, is cut: None where it is too small for any step.

    All of it becomes the fewest steps of equal size that are no larger than the global batch size; what does not divide
    over the ranks is cut off. With 28 samples, --global-batch-size 16 and 4 ranks: two steps of 12 samples, 4 cut off.
    """
    if getattr(args, "use_dynamic_global_batch_size", False):
        step = num_samples // dp_size * dp_size
    else:
        step = num_samples // math.ceil(num_samples / global_batch_size(args)) // dp_size * dp_size
    if step == 0:
        return None
    return type(args)(**{**vars(args), "global_batch_size": step, "disable_rollout_trim_samples": False})


def convert_samples_to_train_data(args: Namespace, samples: list[Sample]) -> TrainData:
    """The columns of a batch (see the head of this file), or what --custom-convert-samples-to-train-data-path makes.

    A sample marked `remove_sample` keeps its place with a loss mask of zeros. An optional field must be there on all
    samples or on none, because a trainer cannot use half a column; a sample with an empty response may lack per-token
    fields.

    Raises ValueError naming field, rule and sample.
    """
    if not samples:
        raise ValueError("the rollout has no samples to train on")
    hook = load_function(getattr(args, "custom_convert_samples_to_train_data_path", None))
    if hook is not None:
        with UserCode("conversion", hook, f"a batch of {len(samples)} samples"):
            data = dict(hook(args, samples))
        _check_custom(data)
        data.setdefault("total_lengths", [len(tokens) for tokens in data["tokens"]])
        data.setdefault("raw_reward", list(data["rewards"]))
        return data
    for sample in samples:
        _check_sample(sample)
    raw_rewards, rewards = normalize_rewards(args, samples)
    return {
        "tokens": [sample.tokens for sample in samples],
        "total_lengths": [len(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": raw_rewards,
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [_loss_mask(sample) for sample in samples],
        **_optional_columns(samples),
    }


def split_train_data_by_dp(args: Namespace, data: TrainData, dp_size: int) -> list[TrainData]:
    """One shard a data-parallel rank, each with the columns of its samples, `global_batch_size` and `partition` (the
    places of its samples in the batch).

    Columns are the lists with one entry a sample; everything else is copied to every shard. Each optimizer step is
    split by itself: round robin, or with --balance-data so that the ranks have about the same number of tokens. With
    --use-dynamic-global-batch-size the batch is one step whatever its size.

    Raises ValueError where the ranks would not get the same number of samples, or a step would be incomplete.
    """
    lengths = data.get("total_lengths") or [len(tokens) for tokens in data["tokens"]]
    num_samples = len(lengths)
    dynamic = getattr(args, "use_dynamic_global_batch_size", False)
    step_size = num_samples if dynamic else global_batch_size(args)
    _check_step_size(num_samples, step_size, dp_size, dynamic=dynamic)
    balance = getattr(args, "balance_data", False)
    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    for start in range(0, num_samples, step_size):
        for rank, members in enumerate(_split_step(lengths[start : start + step_size], dp_size, balance=balance)):
            partitions[rank].extend(start + i for i in members)
    extra = {"global_batch_size": step_size}
    if dynamic:
        extra["dynamic_global_batch_size"] = step_size
    return [
        {**{key: _take(value, partition, num_samples) for key, value in data.items()}, **extra, "partition": partition}
        for partition in partitions
    ]


def _split_step(lengths: Sequence[int], dp_size: int, *, balance: bool) -> list[list[int]]:
    if balance:
        return balanced_partition(lengths, dp_size, equal_size=True)
    return [list(range(rank, len(lengths), dp_size)) for rank in range(dp_size)]


def _take(value: Any, partition: list[int], num_samples: int) -> Any:
    if isinstance(value, list | tuple) and len(value) == num_samples:
        return [value[i] for i in partition]
    return value


def _check_step_size(num_samples: int, step_size: int, dp_size: int, *, dynamic: bool) -> None:
    flag = "--use-dynamic-global-batch-size: the batch" if dynamic else "--global-batch-size"
    if step_size % dp_size:
        raise ValueError(f"{flag} must be a multiple of the data-parallel size {dp_size}, got {step_size} samples")
    if num_samples == 0 or num_samples % step_size:
        raise ValueError(
            f"the batch has {num_samples} samples, which is no whole number of steps of --global-batch-size "
            f"{step_size}; without --disable-rollout-trim-samples the surplus is cut off"
        )


def _check_sample(sample: Sample) -> None:
    sample.validate()
    if not 0 <= sample.response_length < len(sample.tokens):
        raise ValueError(
            f"sample {sample.index}: response_length {sample.response_length} with {len(sample.tokens)} tokens; tokens "
            "holds prompt and response, and the prompt has at least one token"
        )
    for name in _PER_TOKEN_FIELDS:
        values = getattr(sample, name)
        if values is not None and not _all_finite(values):
            raise ValueError(f"sample {sample.index}: {name} has an entry that is no finite number")


def _all_finite(values: Sequence[Any]) -> bool:
    try:
        return math.isfinite(math.fsum(values))
    except (TypeError, ValueError, OverflowError):  # None among the numbers; inf - inf
        return False


def _check_custom(data: TrainData) -> None:
    flag = "--custom-convert-samples-to-train-data-path"
    missing = [key for key in _REQUIRED_KEYS if key not in data]
    if missing:
        raise ValueError(f"{flag}: the function returned no {', '.join(missing)}; it returned {', '.join(data)}")
    lengths = {key: len(data[key]) for key in _REQUIRED_KEYS}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{flag}: the columns have different lengths: {lengths}")


def _loss_mask(sample: Sample) -> list[int]:
    if sample.remove_sample:
        return [0] * sample.response_length
    return sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length


def _optional_columns(samples: list[Sample]) -> TrainData:
    """The columns that only some runs have: decided over all samples."""
    columns: TrainData = {}
    for name in _PER_TOKEN_FIELDS:
        values = [
            [] if getattr(sample, name) is None and sample.response_length == 0 else getattr(sample, name)
            for sample in samples
        ]
        present = any(getattr(sample, name) is not None for sample in samples)
        _add_column(columns, name, name, values if present else [None] * len(samples), samples)
    for name in _REPLAY_FIELDS:
        _add_column(columns, name, name, [getattr(sample, name) for sample in samples], samples)
    _add_column(columns, "metadata", "train_metadata", [sample.train_metadata for sample in samples], samples)
    for key in ("round_number", "raw_reward"):
        _add_column(columns, key, f"metadata[{key!r}]", [sample.metadata.get(key) for sample in samples], samples)
    # These two may be mixed: a batch of texts and images, and samples whose engine did not report a version.
    if any(sample.multimodal_train_inputs is not None for sample in samples):
        columns["multimodal_train_inputs"] = [sample.multimodal_train_inputs for sample in samples]
    if any(sample.weight_versions for sample in samples):
        columns["weight_versions"] = [sample.weight_versions for sample in samples]
    return columns


def _add_column(columns: TrainData, key: str, field: str, values: list[Any], samples: list[Sample]) -> None:
    """Add `values` as `key` if all are there; nothing if none is; ValueError naming the first that is missing."""
    absent = [i for i, value in enumerate(values) if value is None]
    if len(absent) == len(values):
        return
    if absent:
        raise ValueError(
            f"{field}: sample {samples[absent[0]].index} has none, but {len(values) - len(absent)} of {len(values)} "
            "samples of the batch do; it must be set on all samples or on none"
        )
    columns[key] = values
