"""The class-based rollout interface: what a rollout function is built from, called with and returns.

Standard library and `miles.utils.types` only. One rollout object is built per role (training, eval) and serves many
calls:

    fn = load_rollout_function(RolloutFnConstructorInput(args, data_source), path)
    output = call_rollout_function(fn, RolloutFnTrainInput(rollout_id=3))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from miles.rollout.data_source import DataSource
    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
    from miles.utils.types import Sample


class EndOfData(RuntimeError):
    """There is no batch any more, because the data source has no more prompts and every group that it handed out was
    trained or dropped. A rollout function raises it; the run then ends as one that has reached its last step."""


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    """What a rollout class is built from."""

    args: Namespace
    data_source: DataSource


@dataclass(frozen=True)
class RolloutFnBaseInput:
    """One call of a rollout function; `rollout_id` counts training steps from 0."""

    rollout_id: int

    @property
    def evaluation(self) -> bool:
        raise NotImplementedError


@dataclass(frozen=True)
class RolloutFnTrainInput(RolloutFnBaseInput):
    """A request for one training batch. `weight_version` is the trainer's own number, None where it is not known."""

    weight_version: int | None = None

    @property
    def evaluation(self) -> bool:
        return False


@dataclass(frozen=True)
class RolloutFnEvalInput(RolloutFnBaseInput):
    """A request to evaluate: the engines' current weights, or a snapshot where `hf_dir` is set.

    `generate_state` belongs to the engines to use, where they are not those of training. `weight_version` labels the
    weights. `hf_dir` is a Hugging Face checkpoint of exactly these weights.
    """

    generate_state: GenerateState | None = None
    weight_version: str | None = None
    hf_dir: str | None = None

    @property
    def evaluation(self) -> bool:
        return True


RolloutFnInput = RolloutFnTrainInput | RolloutFnEvalInput


@dataclass
class RolloutFnTrainOutput:
    """One training batch: `samples[g]` is a group of `n_samples_per_prompt` members, sorted by index.

    A member is a Sample, or a list of Samples where one trajectory became several training sequences. `is_last`: the
    data has ended, so there are fewer groups than were asked for; the call after this one raises EndOfData.
    """

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None
    is_last: bool = False


@dataclass
class RolloutFnEvalOutput:
    """`data[dataset] = {"rewards": [...], "truncated": [...], "samples": [...]}`, one entry per sample."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


RolloutFnOutput = RolloutFnTrainOutput | RolloutFnEvalOutput


@dataclass(frozen=True)
class GenerateFnInput:
    """One call of a generate function. `sampling_params` is a private copy that the function may change."""

    state: GenerateState
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool

    @property
    def args(self) -> Namespace:
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    """The finished sample, or several where one trajectory becomes several training sequences."""

    samples: Sample | list[Sample]


def call_rollout_fn(fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any) -> RolloutFnOutput:
    """Call a function-style rollout function; a bare return value is boxed."""
    return box_rollout_output(fn(*args, evaluation=evaluation, **kwargs), evaluation=evaluation)


def box_rollout_output(output: Any, *, evaluation: bool) -> RolloutFnOutput:
    """`output` itself where it is typed, else boxed as the data (eval) or the samples (train) of an output."""
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)
