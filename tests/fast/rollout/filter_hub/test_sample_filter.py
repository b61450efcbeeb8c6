from __future__ import annotations

import re
from argparse import Namespace

import pytest

from miles.rollout.filter_hub.sample_filter import apply_sample_filter
from miles.utils.types import Sample


def batch() -> list[list[Sample]]:
    return [[Sample(group_index=g, index=2 * g + i) for i in range(2)] for g in range(3)]


def mark_first(args, groups):
    for group in groups:
        group[0].remove_sample = True


def replace_by_none(args, groups):
    groups[1][0] = None


def replace_in_a_trajectory(args, groups):
    groups[1][0] = [Sample(index=2), 7]


def give_another_list(args, groups):
    return [group for group in groups if group[0].index]


def drop_a_group(args, groups):
    del groups[0]


async def test_a_filter_marks_samples():
    groups = batch()
    await apply_sample_filter(mark_first, Namespace(), groups)
    assert [[sample.remove_sample for sample in group] for group in groups] == [[True, False]] * 3


async def test_a_filter_may_return_the_batch_that_it_got():
    groups = batch()
    await apply_sample_filter(lambda args, groups: groups, Namespace(), groups)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (give_another_list, "give_another_list returned a list, and what it returns is not used; it must mark samples"),
        (replace_by_none, "replace_by_none has put None in the place of a sample of group 1"),
        (replace_in_a_trajectory, "replace_in_a_trajectory has put 7 in the place of a sample of group 1"),
        (drop_a_group, "drop_a_group: the filter changed the batch from 3 groups to 2"),
    ],
)
async def test_a_filter_that_does_anything_else_is_named(fn, message):
    with pytest.raises(ValueError, match=f"^--rollout-sample-filter-path: .*{re.escape(message)}"):
        await apply_sample_filter(fn, Namespace(), batch())


async def test_without_a_fixed_shape_groups_may_go():
    groups = batch()
    await apply_sample_filter(drop_a_group, Namespace(), groups, keeps_shape=False)
    assert len(groups) == 2
