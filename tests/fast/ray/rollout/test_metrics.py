from __future__ import annotations

import random
from argparse import Namespace
from typing import Any

import pytest

from miles.ray.rollout.metrics import eval_metrics, is_repetitive, pass_rates, rollout_metrics, zero_std_counts
from miles.utils.types import PrefixCacheInfo, Sample


def sample(index: int, **fields: Any) -> Sample:
    defaults: dict[str, Any] = {"group_index": index // 2, "response_length": 4, "reward": 1.0, "tokens": [0] * 6}
    return Sample(index=index, **{**defaults, **fields})


BATCH = [
    sample(0, response_length=2, reward=1.0, weight_versions=["3"]),
    sample(1, response_length=4, reward=0.0, weight_versions=["3", "4"], status=Sample.Status.TRUNCATED),
    sample(2, response_length=6, reward=1.0, weight_versions=["5", "5"], loss_mask=[1, 1, 1, 0, 0, 0]),
    sample(3, response_length=8, reward=1.0, weight_versions=["default"], non_generation_time=2.0),
]
for _sample in BATCH:
    _sample.prefix_cache_info = PrefixCacheInfo(cached_tokens=3, total_prompt_tokens=4)


def test_the_metrics_of_a_batch() -> None:
    args = Namespace(n_samples_per_prompt=2, rollout_num_gpus=2, log_passrate=True)
    assert rollout_metrics(args, BATCH, rollout_time=5.0, num_trimmed=1) == {
        "rollout/num_groups": 2,
        "rollout/num_samples": 4,
        "rollout/trimmed_samples": 1,
        "rollout/raw_reward": 0.75,
        # Lengths that are trained on: 2, 4, 3 (three of six masked), 8.
        "rollout/response_len/mean": 4.25,
        "rollout/response_len/median": 3.5,
        "rollout/response_len/max": 8,
        "rollout/response_len/min": 2,
        "rollout/truncated_ratio": 0.25,
        "rollout/repetition_frac": 0.0,
        # The second group has equal rewards, both 1.
        "rollout/zero_std/count": 1,
        "rollout/zero_std/count_1.0": 1,
        "rollout/prefix_cache_hit_rate": 0.75,
        "rollout/avg_cached_tokens_per_sample": 3.0,
        # Oldest versions 3, 3, 5; the last sample has none. Only sample 1 was written by two versions.
        "rollout/weight_version/mean": pytest.approx(11 / 3),
        "rollout/weight_version/median": 3,
        "rollout/weight_version/max": 5,
        "rollout/weight_version/min": 3,
        "rollout/weight_version/mixed_version_ratio": 0.25,
        "perf/rollout_time": 5.0,
        # 20 tokens in 5 s on 2 GPUs, of which 17 are trained on; the longest has 8.
        "perf/tokens_per_gpu_per_sec": 2.0,
        "perf/effective_tokens_per_gpu_per_sec": 1.7,
        "perf/longest_sample_tokens_per_sec": 1.6,
        "perf/non_generation_time/mean": 0.5,
        "perf/non_generation_time/median": 0.0,
        "perf/non_generation_time/max": 2.0,
        "perf/non_generation_time/min": 0.0,
        # One of two right, and both right: (1/2 + 1) / 2; of two drawn one is right for sure.
        "passrate/pass@1": 0.75,
        "passrate/pass@2": 1.0,
    }


def test_keys_that_need_a_time_or_a_version_or_a_flag_are_left_out() -> None:
    metrics = rollout_metrics(Namespace(n_samples_per_prompt=2), [sample(0), sample(1)])
    assert "perf/rollout_time" not in metrics
    assert "rollout/weight_version/mean" not in metrics
    assert metrics["rollout/weight_version/mixed_version_ratio"] == 0.0
    assert not any(key.startswith("passrate/") for key in metrics)


def test_raw_rewards_of_the_train_data_win() -> None:
    metrics = rollout_metrics(Namespace(n_samples_per_prompt=2), BATCH, raw_rewards=[5.0, 5.0, 1.0, 3.0])
    assert metrics["rollout/raw_reward"] == 3.5
    assert metrics["rollout/zero_std/count_5.0"] == 1


@pytest.mark.parametrize(("group_size", "groups"), [(2, 2), (3, 4)])
def test_samples_without_a_group_are_counted_in_runs_or_alone(group_size: int, groups: int) -> None:
    samples = [sample(i, group_index=None if i else 0) for i in range(4)]
    assert rollout_metrics(Namespace(n_samples_per_prompt=group_size), samples)["rollout/num_groups"] == groups


def test_zero_std_counts_groups_by_rounded_reward() -> None:
    assert zero_std_counts([[0.0, 0.0], [-0.0, 0.0], [0.32, 0.32], [1.0, 0.0], [1.0]]) == {
        "count": 3,
        "count_0.0": 2,
        "count_0.3": 1,
    }


def test_pass_rates_are_unbiased() -> None:
    # Of four answers one is right: 1/4; 1 - C(3,2)/C(4,2) = 1/2; 1. Of two wrong answers: 0, 0, and the group is too
    # small for k = 4.
    assert pass_rates([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0]]) == {"pass@1": 0.125, "pass@2": 0.25, "pass@4": 1.0}


def test_a_text_is_repetitive_where_its_end_is() -> None:
    words = random.Random(0)
    prose = " ".join("".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(2000))
    assert not is_repetitive(prose)
    assert is_repetitive(prose + " wait, let me check." * 300)
    assert not is_repetitive("wait " * 100)


def test_the_metrics_of_an_evaluation() -> None:
    args = Namespace(n_samples_per_eval_prompt=2, log_passrate=True)
    samples = [sample(i, group_index=None, response_length=i + 1) for i in range(4)]
    data = {
        "aime": {
            "rewards": [1.0, 0.0, None, float("nan")],
            "truncated": [True, False, False, False],
            "samples": samples,
        },
        "sort": {"rewards": [1.0]},
    }
    assert eval_metrics(args, data) == {
        "eval/aime": 0.25,
        "eval/aime-none_reward_ratio": 0.5,
        "eval/aime-truncated_ratio": 0.25,
        "eval/aime/response_len/mean": 2.5,
        "eval/aime/response_len/median": 2.5,
        "eval/aime/response_len/max": 4,
        "eval/aime/response_len/min": 1,
        "eval/aime/repetition_frac": 0.0,
        "eval/aime-pass@1": 0.25,
        "eval/aime-pass@2": 0.5,
        "eval/sort": 1.0,
        "eval/sort-none_reward_ratio": 0.0,
        "eval/sort-pass@1": 1.0,
    }


def test_eval_groups_by_index_where_the_samples_have_one() -> None:
    # Three answers to the first prompt, one to the second, whatever --n-samples-per-eval-prompt says.
    samples = [sample(i, group_index=group) for i, group in enumerate([0, 0, 0, 1])]
    data = {"x": {"rewards": [1.0, 0.0, 0.0, 0.0], "samples": samples}}
    metrics = eval_metrics(Namespace(n_samples_per_eval_prompt=2, log_passrate=True), data)
    assert metrics["eval/x-pass@1"] == pytest.approx((1 / 3 + 0) / 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rollout_metrics(Namespace(), []), "no samples"),
        (lambda: eval_metrics(Namespace(), {"aime": {"rewards": []}}), "eval data set 'aime': no rewards"),
        (lambda: eval_metrics(Namespace(), {"aime": {"rewards": [{"acc": 1}]}}), "--eval-reward-key"),
    ],
)
def test_nothing_to_measure_is_an_error(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_samples_without_a_reward_count_in_no_mean_of_rewards_and_are_counted() -> None:
    missing = {"metadata": {"missing_reward": "judge"}, "reward": 0.0}
    batch = [sample(0), sample(1, **missing), sample(2, **missing), sample(3, **missing)]
    metrics = rollout_metrics(Namespace(n_samples_per_prompt=2, missing_reward="remove"), batch)
    assert metrics["rollout/raw_reward"] == 1.0
    assert metrics["rollout/missing_rewards"] == 3
    assert (metrics["rollout/num_groups"], metrics["rollout/num_samples"]) == (2, 4)
    assert metrics["rollout/zero_std/count"] == 0
    assert rollout_metrics(Namespace(missing_reward="remove"), batch[2:])["rollout/raw_reward"] == 0.0
