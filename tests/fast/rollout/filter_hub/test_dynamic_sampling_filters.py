from argparse import Namespace

import pytest

from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.filter_hub.dynamic_sampling_filters import check_no_aborted, check_reward_nonzero_std
from miles.utils.types import Sample

ARGS = Namespace(reward_key=None)


def group(*rewards):
    return [Sample(reward=reward) for reward in rewards]


@pytest.mark.parametrize("rewards", [(0, 1), (0.1, 0.1 + 1e-6), (1, 1, 1, 0)])
def test_groups_with_differing_rewards_are_kept(rewards):
    assert check_reward_nonzero_std(ARGS, group(*rewards)) == DynamicFilterOutput(keep=True)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0, 0), "zero_std_0.0"),
        ((1, 1, 1), "zero_std_1.0"),
        ((0.26, 0.26 + 1e-12), "zero_std_0.3"),
        ((-1,), "zero_std_-1.0"),
    ],
)
def test_groups_with_equal_rewards_are_dropped_with_the_reward_in_the_reason(rewards, reason):
    assert check_reward_nonzero_std(ARGS, group(*rewards)) == DynamicFilterOutput(keep=False, reason=reason)


def test_the_reward_key_chooses_the_entry():
    samples = group({"score": 1, "length": 3}, {"score": 1, "length": 4})
    assert not check_reward_nonzero_std(Namespace(reward_key="score"), samples).keep
    assert check_reward_nonzero_std(Namespace(reward_key="length"), samples).keep


def test_nested_groups_are_flattened():
    assert check_reward_nonzero_std(ARGS, [group(1, 1), group(1, 0)], extra=1).keep
    nested = [[Sample(), [Sample(status=Sample.Status.ABORTED)]], Sample()]
    assert check_no_aborted(ARGS, nested) == DynamicFilterOutput(keep=False, reason="group_has_aborted")


def test_an_empty_group_is_an_error():
    with pytest.raises(ValueError, match="no samples"):
        check_reward_nonzero_std(ARGS, [])


@pytest.mark.parametrize("status", [status for status in Sample.Status if status is not Sample.Status.ABORTED])
def test_groups_without_aborted_samples_are_kept(status):
    assert check_no_aborted(ARGS, [Sample(status=status)], extra=1) == DynamicFilterOutput(keep=True)


def test_samples_without_a_reward_are_left_out():
    missing = Sample(reward=0.0, metadata={"missing_reward": "judge"})
    assert not check_reward_nonzero_std(ARGS, [*group(1, 1), missing]).keep
    assert check_reward_nonzero_std(ARGS, [*group(1, 2), missing]).keep
    assert check_reward_nonzero_std(ARGS, [missing]) == DynamicFilterOutput(keep=False, reason="no_reward")
