from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.ray.rollout.train_data import (
    args_of_last_batch,
    convert_samples_to_train_data,
    flatten_and_trim,
    global_batch_size,
    split_train_data_by_dp,
)
from miles.utils.misc import function_registry
from miles.utils.types import Sample


def sample(index: int, response_length: int = 2, **fields: Any) -> Sample:
    defaults: dict[str, Any] = {
        "group_index": index // 2,
        "tokens": list(range(100, 103 + response_length)),
        "response_length": response_length,
        "reward": float(index % 2),
        "status": Sample.Status.COMPLETED,
    }
    return Sample(index=index, **{**defaults, **fields})


def flags(**more: Any) -> Namespace:
    return Namespace(
        **{"advantage_estimator": "grpo", "n_samples_per_prompt": 2, "rollout_batch_size": 2, "global_batch_size": 4}
        | more
    )


def test_nested_groups_are_flattened_in_order_and_the_tail_is_cut() -> None:
    groups = [[sample(0), [sample(1), sample(2)]], [[sample(3)], sample(4)]]
    samples, num_trimmed = flatten_and_trim(flags(), groups)
    assert [s.index for s in samples] == [0, 1, 2, 3]
    assert num_trimmed == 1


@pytest.mark.parametrize(
    ("more", "dp_size", "kept"),
    [
        ({}, 1, 4),
        ({"disable_rollout_trim_samples": True}, 1, 7),
        ({"use_dynamic_global_batch_size": True}, 3, 6),
        ({"global_batch_size": None, "num_steps_per_rollout": 2}, 1, 6),
    ],
)
def test_what_the_samples_are_cut_to(more: dict[str, Any], dp_size: int, kept: int) -> None:
    samples, num_trimmed = flatten_and_trim(flags(**more), [[sample(i) for i in range(7)]], dp_size=dp_size)
    assert (len(samples), num_trimmed) == (kept, 7 - kept)


@pytest.mark.parametrize(
    ("more", "num_samples", "dp_size", "steps", "cut_off"),
    [
        ({"global_batch_size": 16}, 12, 1, [12], 0),
        ({"global_batch_size": 16}, 28, 1, [14, 14], 0),
        ({"global_batch_size": 16}, 28, 4, [12, 12], 4),
        ({"global_batch_size": 16}, 3, 2, [2], 1),
        ({"global_batch_size": 16}, 3, 4, None, 3),
        ({"global_batch_size": 4}, 7, 1, [3, 3], 1),
        ({"global_batch_size": 4, "disable_rollout_trim_samples": True}, 7, 1, [3, 3], 1),
        ({"global_batch_size": None, "num_steps_per_rollout": 2, "rollout_batch_size": 8}, 12, 2, [6, 6], 0),
        ({"use_dynamic_global_batch_size": True}, 7, 2, [6], 1),
        ({"use_dynamic_global_batch_size": True}, 1, 2, None, 1),
    ],
)
def test_the_last_batch_is_trained_as_far_as_it_divides_over_the_ranks(
    more: dict[str, Any], num_samples: int, dp_size: int, steps: list[int] | None, cut_off: int
) -> None:
    args = flags(**more)
    of_last = args_of_last_batch(args, num_samples, dp_size)
    assert vars(args) == vars(flags(**more)), "the run's own flags stay"
    if of_last is None:
        assert steps is None
        return
    samples, num_trimmed = flatten_and_trim(of_last, [[sample(i)] for i in range(num_samples)], dp_size=dp_size)
    shards = split_train_data_by_dp(of_last, convert_samples_to_train_data(flags(), samples), dp_size)
    assert [shards[0]["global_batch_size"]] * len(steps or ()) == steps
    assert sum(len(shard["tokens"]) for shard in shards) == sum(steps or ()) == num_samples - cut_off
    assert num_trimmed == cut_off


def test_nothing_left_and_foreign_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="3 samples, fewer than --global-batch-size 4"):
        flatten_and_trim(flags(), [[sample(0), sample(1), sample(2)]])
    with pytest.raises(ValueError, match="lists of Sample, found str"):
        flatten_and_trim(flags(), [[sample(0), "answer"]])


def test_global_batch_size_from_steps() -> None:
    assert global_batch_size(flags(global_batch_size=None)) == 4
    assert global_batch_size(flags(global_batch_size=None, num_steps_per_rollout=2)) == 2


def test_the_columns_of_plain_samples() -> None:
    samples = [
        sample(0, rollout_log_probs=[-0.1, -0.2], weight_versions=["3"]),
        sample(1, 3, rollout_log_probs=[-0.3] * 3, loss_mask=[1, 0, 1], status=Sample.Status.TRUNCATED),
    ]
    data = convert_samples_to_train_data(flags(), samples)
    deviation = 0.5 / (0.5**0.5 + 1e-6)
    assert data.pop("rewards") == pytest.approx([-deviation, deviation])
    assert data == {
        "tokens": [[100, 101, 102, 103, 104], [100, 101, 102, 103, 104, 105]],
        "total_lengths": [5, 6],
        "response_lengths": [2, 3],
        "raw_reward": [0.0, 1.0],
        "truncated": [0, 1],
        "sample_indices": [0, 1],
        "loss_masks": [[1, 1], [1, 0, 1]],
        "rollout_log_probs": [[-0.1, -0.2], [-0.3, -0.3, -0.3]],
        "weight_versions": [["3"], []],
    }


def test_a_removed_sample_keeps_its_place_with_an_empty_mask() -> None:
    data = convert_samples_to_train_data(flags(), [sample(0, remove_sample=True, loss_mask=[1, 1]), sample(1)])
    assert data["loss_masks"] == [[0, 0], [1, 1]]


def test_every_optional_column() -> None:
    fields: dict[str, Any] = {
        "rollout_log_probs": [-1.0, -1.0],
        "teacher_log_probs": [-1.0, -1.0],
        "opd_reverse_kl": [0.0, 0.0],
        "rollout_routed_experts": [[0]] * 4,
        "rollout_indexer_topk": [[0]] * 4,
        "train_metadata": {"a": 1},
        "multimodal_train_inputs": {"pixels": 1},
        "metadata": {"round_number": 2, "raw_reward": 5.0},
    }
    data = convert_samples_to_train_data(flags(), [sample(0, **fields), sample(1, **fields)])
    for name in set(fields) - {"metadata", "train_metadata"}:
        assert data[name] == [fields[name]] * 2
    assert (data["metadata"], data["round_number"], data["raw_reward"]) == ([{"a": 1}] * 2, [2, 2], [5.0, 5.0])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"rollout_log_probs": [-1.0, -1.0]}, "rollout_log_probs"),
        ({"teacher_log_probs": [-1.0, -1.0]}, "teacher_log_probs"),
        ({"rollout_routed_experts": [[0]] * 4}, "rollout_routed_experts"),
        ({"train_metadata": {}}, "train_metadata"),
        ({"metadata": {"round_number": 1}}, r"metadata\['round_number'\]"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_half_a_column_is_refused_wherever_it_starts(fields: dict[str, Any], name: str, place: int) -> None:
    samples = [sample(i, **(fields if i != place else {})) for i in range(3)]
    samples.append(sample(3))
    with pytest.raises(ValueError, match=rf"{name}: sample {place} has none, but 2 of 4 samples of the batch do"):
        convert_samples_to_train_data(flags(), samples)


def test_an_empty_response_needs_no_log_probs() -> None:
    samples = [sample(0, rollout_log_probs=[-1.0, -1.0]), sample(1, 0)]
    assert convert_samples_to_train_data(flags(), samples)["rollout_log_probs"] == [[-1.0, -1.0], []]


def test_images_may_be_mixed_with_texts() -> None:
    samples = [sample(0), sample(1, multimodal_train_inputs={"pixels": 1})]
    assert convert_samples_to_train_data(flags(), samples)["multimodal_train_inputs"] == [None, {"pixels": 1}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [1]}, "sample 0: loss_mask has 1 entries, response_length is 2"),
        ({"tokens": [1, 2]}, "sample 0: response_length 2 with 2 tokens"),
        ({"rollout_log_probs": [-1.0, float("nan")]}, "sample 0: rollout_log_probs has an entry that is no finite"),
        ({"rollout_log_probs": [-1.0, None]}, "sample 0: rollout_log_probs has an entry that is no finite"),
        ({"reward": float("nan")}, "sample 0 has nan"),
    ],
)
def test_a_bad_sample_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert_samples_to_train_data(flags(), [sample(0, **fields), sample(1)])


def test_no_samples_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        convert_samples_to_train_data(flags(), [])


def test_a_custom_conversion_is_checked() -> None:
    def convert(args: Namespace, samples: list[Sample]) -> dict[str, Any]:
        return {"tokens": [[1, 2, 3]], "response_lengths": [1], "loss_masks": [[1]], "rewards": [0.5], "extra": "x"}

    args = flags(custom_convert_samples_to_train_data_path="convert")
    with function_registry.temporary("convert", convert):
        data = convert_samples_to_train_data(args, [sample(0)])
    assert (data["total_lengths"], data["raw_reward"], data["extra"]) == ([3], [0.5], "x")
    with (
        function_registry.temporary("convert", lambda args, samples: {"tokens": [[1]], "rewards": [1.0]}),
        pytest.raises(ValueError, match="returned no response_lengths, loss_masks"),
    ):
        convert_samples_to_train_data(args, [sample(0)])
    with (
        function_registry.temporary("convert", lambda args, samples: {**convert(args, samples), "rewards": []}),
        pytest.raises(ValueError, match="different lengths"),
    ):
        convert_samples_to_train_data(args, [sample(0)])


def columns(lengths: list[int]) -> dict[str, Any]:
    return {"tokens": [[0] * length for length in lengths], "total_lengths": lengths, "id": list(range(len(lengths)))}


def test_round_robin_by_default() -> None:
    shards = split_train_data_by_dp(flags(), {**columns([3] * 8), "note": "all"}, 2)
    assert [shard["id"] for shard in shards] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [shard["partition"] for shard in shards] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert all(shard["global_batch_size"] == 4 and shard["note"] == "all" for shard in shards)


def test_balanced_ranks_within_each_step() -> None:
    # Step one is 9, 1, 9, 1: a long and a short one each; round robin would give 18 against 2.
    shards = split_train_data_by_dp(flags(balance_data=True), columns([9, 1, 9, 1, 5, 5, 5, 5]), 2)
    assert [sum(shard["total_lengths"][:2]) for shard in shards] == [10, 10]
    assert sorted(shards[0]["id"][:2] + shards[1]["id"][:2]) == [0, 1, 2, 3]


def test_a_dynamic_batch_is_one_step() -> None:
    shards = split_train_data_by_dp(flags(use_dynamic_global_batch_size=True), columns([3] * 6), 3)
    assert [(shard["global_batch_size"], shard["dynamic_global_batch_size"]) for shard in shards] == [(6, 6)] * 3


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.integers(1, 900), min_size=64, max_size=64),
)
def test_every_sample_goes_to_exactly_one_rank_in_its_own_step(
    dp_size: int, per_rank: int, steps: int, balance: bool, lengths: list[int]
) -> None:
    step_size = dp_size * per_rank
    lengths = lengths[: step_size * steps]
    shards = split_train_data_by_dp(flags(global_batch_size=step_size, balance_data=balance), columns(lengths), dp_size)
    assert sorted(i for shard in shards for i in shard["id"]) == list(range(len(lengths)))
    for shard in shards:
        assert shard["total_lengths"] == [lengths[i] for i in shard["id"]]
        assert [i // step_size for i in shard["id"]] == [step for step in range(steps) for _ in range(per_rank)]


@pytest.mark.parametrize(
    ("more", "num", "dp_size", "message"),
    [
        ({}, 6, 2, "no whole number of steps of --global-batch-size 4"),
        ({}, 4, 3, "multiple of the data-parallel size 3, got 4"),
        ({"use_dynamic_global_batch_size": True}, 5, 2, "--use-dynamic-global-batch-size"),
        ({}, 0, 2, "0 samples"),
    ],
)
def test_uneven_splits_are_refused(more: dict[str, Any], num: int, dp_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_train_data_by_dp(flags(**more), columns([3] * num), dp_size)
