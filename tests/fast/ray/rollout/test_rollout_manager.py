"""Training and evaluation never share a rollout function; what a batch becomes, and the end of the data."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest

from miles.ray.rollout.rollout_manager import DataEnd, GeneratedBatch, RolloutManager, load_rollout_functions
from miles.rollout.base_types import EndOfData, RolloutFnTrainOutput
from miles.rollout.fully_async_rollout import FullyAsyncRolloutFn
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
from miles.utils.misc import function_registry
from tests.fast.fakes import answer, prompt_group
from tests.fast.rollout.engine_stub import make_args

if TYPE_CHECKING:
    from miles.utils.types import Sample


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


class StepState:
    """The rollout's state, as far as a batch that is left out concerns it."""

    def __init__(self) -> None:
        self.given_back: list[int] = []

    def before_generate(self, rollout_id: int) -> None:
        pass

    def give_back(self, rollout_id: int) -> None:
        self.given_back.append(rollout_id)


def manager(monkeypatch: pytest.MonkeyPatch, output: RolloutFnTrainOutput | None, **flags: Any) -> RolloutManager:
    """A manager without processes whose rollout function returns this output; None: the data has ended."""

    def rollout_fn(input: Any) -> RolloutFnTrainOutput:
        if output is None:
            raise EndOfData("no prompts left")
        return output

    monkeypatch.setattr("miles.ray.rollout.rollout_manager.ray.put", lambda shard: shard)
    made = object.__new__(RolloutManager)
    made._args = Namespace(
        **{"rollout_batch_size": 8, "n_samples_per_prompt": 2, "global_batch_size": 16, "advantage_estimator": "grpo"}
        | flags
    )
    made._rollout_fn, made._state, made._dp_size = rollout_fn, StepState(), 2  # type: ignore[assignment]
    made._weight_version, made._log_rollout, made._trace = None, None, None
    return made


def groups(count: int, size: int = 2) -> list[list[Sample]]:
    return [answer(prompt_group(index, size)) for index in range(count)]


def test_a_short_last_batch_is_trained_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = manager(monkeypatch, RolloutFnTrainOutput(groups(3), is_last=True))._generate(5)
    assert isinstance(batch, GeneratedBatch)
    assert [box.ref["global_batch_size"] for box in batch.data_ref] == [6, 6]
    assert batch.sample_indices == [0, 1, 2, 3, 4, 5] and batch.samples_cut_off == 0
    assert batch.metrics["rollout/num_samples"] == 6


def test_a_short_batch_is_an_error_while_there_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="fewer than --global-batch-size 16"):
        manager(monkeypatch, RolloutFnTrainOutput(groups(3)))._generate(5)


def test_a_last_batch_that_makes_no_step_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = manager(monkeypatch, RolloutFnTrainOutput(groups(1, size=1), is_last=True))
    end = made._generate(5)
    assert isinstance(end, DataEnd) and end.samples_left_out == 1
    assert end.reason == "the last 1 samples are fewer than the 2 trainer ranks, and are left out"
    assert made._state.given_back == [5]  # type: ignore[attr-defined]


def test_the_end_of_the_data_is_an_answer_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert manager(monkeypatch, None)._generate(5) == DataEnd("no prompts left")


@pytest.mark.parametrize(
    ("prompts", "epochs", "batches"), [(8, 3, 3), (17, 2, 4), (3, 8, 3), (7, 2, 1), (3, 1, 1), (1, 1, 1)]
)
async def test_rollouts_of_so_many_epochs(
    prompts: int, epochs: int, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager(monkeypatch, None)
    made._data_source = Namespace(dataset=range(prompts))  # type: ignore[assignment]
    assert await made.get_num_rollout(epochs) == batches
