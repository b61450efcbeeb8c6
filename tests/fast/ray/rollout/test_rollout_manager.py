"""Training and evaluation never share a rollout function."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from miles.ray.rollout.rollout_manager import load_rollout_functions
from miles.rollout.fully_async_rollout import FullyAsyncRolloutFn
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
from miles.utils.misc import function_registry
from tests.fast.rollout.engine_stub import make_args

if TYPE_CHECKING:
    import pytest


class RecordingFn:
    def __init__(self, input: Any) -> None:
        self.args = input.args


def test_equal_paths_give_two_instances() -> None:
    with function_registry.temporary("recording", RecordingFn):
        args = Namespace(rollout_function_path="recording", eval_function_path="recording")
        rollout_fn, eval_fn = load_rollout_functions(args, data_source=None)  # type: ignore[arg-type]
    assert type(rollout_fn) is type(eval_fn) is RecordingFn
    assert rollout_fn is not eval_fn


def test_fully_async_replaces_training_alone_and_the_two_have_states_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MILES_EXPERIMENTAL_ROLLOUT_REFACTOR", "1")
    args = make_args(
        fully_async=True,
        rollout_global_dataset=True,
        max_weight_staleness=None,
        async_max_concurrent_samples=None,
        dynamic_sampling_filter_path=None,
        rollout_sample_filter_path=None,
    )
    rollout_fn, eval_fn = load_rollout_functions(args, data_source=None)  # type: ignore[arg-type]
    assert isinstance(rollout_fn, FullyAsyncRolloutFn) and isinstance(eval_fn, InferenceRolloutFn)
    assert rollout_fn.state is not eval_fn.state
