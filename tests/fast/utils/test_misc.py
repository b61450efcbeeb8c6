from __future__ import annotations

import pytest

from miles.utils.misc import SingletonMeta, function_registry, load_function, should_run_periodic_action
from miles.utils.timeline import BusyIntervals


def test_load_function_returns_the_object_at_the_path() -> None:
    assert load_function("miles.utils.misc.load_function") is load_function
    assert load_function(None) is None
    assert load_function("") is None


def test_load_function_names_what_a_module_has_instead() -> None:
    with pytest.raises(ValueError, match=r"module 'miles\.utils\.misc' has no 'load_functions'; it has load_function"):
        load_function("miles.utils.misc.load_functions")


def test_load_function_names_the_missing_module() -> None:
    with pytest.raises(ValueError, match=r"there is no module 'no_such_package'"):
        load_function("no_such_package.rewards.f")
    with pytest.raises(ValueError, match="not a dotted path"):
        load_function("reward")


def test_registered_functions_come_before_dotted_paths_and_only_within_the_block() -> None:
    with function_registry.temporary("mine", len):
        assert load_function("mine") is len
        with pytest.raises(ValueError, match="registered already"), function_registry.temporary("mine", len):
            pass
    with pytest.raises(ValueError, match="not a dotted path"):
        load_function("mine")


@pytest.mark.parametrize(
    ("rollout_id", "interval", "per_epoch", "total", "due"),
    [
        (0, None, 1, 1, False),
        (0, 2, None, None, False),
        (1, 2, None, None, True),
        (8, 2, None, 9, True),
        (2, 100, 3, None, True),
        (3, 100, 3, None, False),
    ],
)
def test_periodic_actions(
    rollout_id: int, interval: int | None, per_epoch: int | None, total: int | None, due: bool
) -> None:
    assert should_run_periodic_action(rollout_id, interval, per_epoch, total) is due


def test_a_singleton_class_has_one_instance_until_it_is_cleared() -> None:
    class Only(metaclass=SingletonMeta):
        pass

    first = Only()
    assert Only() is first
    SingletonMeta.clear(Only)
    assert Only() is not first


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_work_is_one_busy_interval_and_an_open_one_is_cut_by_the_drain() -> None:
    clock = Clock()
    busy = BusyIntervals(clock)
    with busy:
        clock.now = 1.0
        with busy:
            clock.now = 2.0
    clock.now = 5.0
    assert busy.drain() == [(0.0, 2.0)]
    with busy:
        clock.now = 6.0
        assert busy.drain() == [(5.0, 6.0)]
        clock.now = 7.0
    assert busy.drain() == [(6.0, 7.0)]
    assert busy.drain() == []
