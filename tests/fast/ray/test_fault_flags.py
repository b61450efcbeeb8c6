from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

import pytest

from miles.ray import fault_flags
from miles.ray.faults import tolerates_engine_faults


def parse(*argv: str, **others: Any) -> Namespace:
    parser = argparse.ArgumentParser()
    fault_flags.add_flags(parser)
    defaults = {
        "sample_max_retries": 3,
        "rollout_num_gpus": 2,
        "rollout_num_gpus_per_engine": 1,
        "distributed_timeout_minutes": 10,
    }
    return Namespace(**{**vars(parser.parse_args(list(argv))), **defaults, **others})


def test_off_by_default_and_on_for_engines() -> None:
    assert not tolerates_engine_faults(parse())
    assert tolerates_engine_faults(parse("--use-fault-tolerance"))


@pytest.mark.parametrize(
    ("argv", "others", "message"),
    [
        (("--ft-components", "rollout", "train"), {}, "--ft-components train: lost training ranks are not replaced"),
        (("--rollout-health-check-timeout", "0"), {}, "--rollout-health-check-timeout must be greater than 0"),
        (("--heartbeat-timeout-secs", "0"), {}, "--heartbeat-timeout-secs must be greater than 0, got 0.0"),
        (("--heartbeat-timeout-secs", "nan"), {}, "--heartbeat-timeout-secs must be greater than 0, got nan"),
        (
            ("--heartbeat-timeout-secs", "90"),
            {"distributed_timeout_minutes": 1},
            "--heartbeat-timeout-secs 90 must not be above --distributed-timeout-minutes 1: the other ranks",
        ),
        (("--use-fault-tolerance",), {"sample_max_retries": 0}, "--use-fault-tolerance with --sample-max-retries 0"),
    ],
)
def test_what_cannot_be_is_refused(argv: tuple[str, ...], others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fault_flags.validate(parse(*argv, **others))


def test_flags_without_effect_are_told() -> None:
    (line,) = fault_flags.warnings(parse(), frozenset({"rollout_health_check_interval"}))
    assert line == "--rollout-health-check-interval has no effect without --use-fault-tolerance"
    (line,) = fault_flags.warnings(parse("--use-fault-tolerance", rollout_num_gpus=1), frozenset())
    assert "one engine" in line
    assert not list(fault_flags.warnings(parse("--use-fault-tolerance"), frozenset()))
