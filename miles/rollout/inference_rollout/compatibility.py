"""Plug-ins of every accepted shape behind one way of calling them.

| plug-in | accepted shapes |
|---|---|
| rollout function | class(RolloutFnConstructorInput) with a plain or async `__call__(input)`; function(args, rollout_id, data_source, evaluation=) that returns typed output or bare data, plain or async |
| generate function | function(input: GenerateFnInput); class() with `__call__(input)`; function(args, sample, sampling_params[, evaluation]) that returns samples; each plain or async |
"""  # noqa: E501 - a table

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, overload

from miles.rollout.base_types import (
    GenerateFnInput,
    GenerateFnOutput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnInput,
    RolloutFnOutput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
    box_rollout_output,
)
from miles.utils.async_utils import run
from miles.utils.misc import load_function
from miles.utils.types import Sample
from miles.utils.user_calls import UserCode, name_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


_ANSWERED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


def load_rollout_function(input: RolloutFnConstructorInput, path: str) -> Any:
    """The rollout function at `path`: a class is instantiated, a function gets the adapter for functions."""
    fn: Any = load_function(path)
    if fn is None:
        raise ValueError("no rollout function: the path is empty")
    if isinstance(fn, type):
        return fn(input)
    if not callable(fn):
        raise ValueError(f"{path!r} is not a rollout function: {fn!r} cannot be called")
    return LegacyRolloutFnAdapter(input, fn)


class LegacyRolloutFnAdapter:
    """A function `fn(args, rollout_id, data_source, evaluation=)` called like a rollout class."""

    def __init__(self, input: RolloutFnConstructorInput, fn: Callable[..., Any]) -> None:
        self.args = input.args
        self.data_source = input.data_source
        self.fn = fn

    def __call__(self, input: RolloutFnInput) -> Any:
        """The boxed output; for an async function, a coroutine that returns it."""
        output = self.fn(self.args, input.rollout_id, self.data_source, evaluation=input.evaluation)
        if inspect.isawaitable(output):
            return self._box_later(output, evaluation=input.evaluation)
        return box_rollout_output(output, evaluation=input.evaluation)

    @staticmethod
    async def _box_later(output: Awaitable[Any], *, evaluation: bool) -> RolloutFnOutput:
        return box_rollout_output(await output, evaluation=evaluation)


@overload
def call_rollout_function(fn: Callable[..., Any], input: RolloutFnTrainInput) -> RolloutFnTrainOutput: ...
@overload
def call_rollout_function(fn: Callable[..., Any], input: RolloutFnEvalInput) -> RolloutFnEvalOutput: ...
def call_rollout_function(fn: Callable[..., Any], input: RolloutFnInput) -> RolloutFnOutput:
    """Call a loaded rollout function and wait for its output; coroutines run on the shared rollout event loop.

    Blocks, so it is called from outside that loop. Raises ValueError naming the function where it returns something
    else than the output of the call (training or evaluation).
    """
    output = fn(input)
    if inspect.iscoroutine(output):
        output = run(output)
    expected = RolloutFnEvalOutput if input.evaluation else RolloutFnTrainOutput
    if not isinstance(output, expected):
        raise ValueError(
            f"rollout function {describe(fn)} must return {expected.__name__} for "
            f"{'evaluation' if input.evaluation else 'training'}, got {shorten(output)}"
        )
    return output


def load_generate_function(path: str | None) -> Any:
    """The generate function at `path` as a callable of one GenerateFnInput; None for None."""
    fn = load_function(path)
    if fn is None:
        return None
    if isinstance(fn, type):
        return fn()
    if not callable(fn):
        raise ValueError(f"{path!r} is not a generate function: {fn!r} cannot be called")
    return LegacyGenerateFnAdapter(fn) if _is_legacy_generate_function(fn) else fn


def _is_legacy_generate_function(fn: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(fn).parameters)
    return len(parameters) >= 3 and parameters[0] != "input"


class LegacyGenerateFnAdapter:
    """A function `fn(args, sample, sampling_params[, evaluation])` called with one GenerateFnInput."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self._takes_evaluation = "evaluation" in inspect.signature(fn).parameters

    async def __call__(self, input: GenerateFnInput) -> GenerateFnOutput:
        keywords = {"evaluation": input.evaluation} if self._takes_evaluation else {}
        output = self.fn(input.args, input.sample, input.sampling_params, **keywords)
        if inspect.isawaitable(output):
            output = await output
        return output if isinstance(output, GenerateFnOutput) else GenerateFnOutput(samples=output)


async def call_generate_function(fn: Callable[[GenerateFnInput], Any], input: GenerateFnInput) -> Any:
    """Call a loaded generate function: the Sample, or the non-empty list of Samples, that it made.

    What it raises comes out with a note that names function and sample. Raises ValueError naming function, sample and
    value where it returns anything else, or a sample without an answer or a status. A sample that has an answer and is
    still PENDING becomes COMPLETED.
    """
    with UserCode("generate function", unwrap(fn), SampleName(input.sample)):
        output = fn(input)
        if inspect.isawaitable(output):
            output = await output
    samples = output.samples if isinstance(output, GenerateFnOutput) else output
    is_list = isinstance(samples, list) and len(samples) > 0 and all(isinstance(s, Sample) for s in samples)
    if not isinstance(output, GenerateFnOutput) or not (isinstance(samples, Sample) or is_list):
        raise ValueError(
            f"generate function {describe(fn)} must return GenerateFnOutput with a Sample or a non-empty list of "
            f"Samples, got {shorten(output)} for {SampleName(input.sample)}"
        )
    for sample in samples if isinstance(samples, list) else (samples,):
        if sample.status not in _ANSWERED:
            _settle_status(fn, sample, input.sample)
    return samples


def _settle_status(fn: Any, sample: Sample, asked: Sample) -> None:
    if not isinstance(sample.status, Sample.Status):
        raise ValueError(
            f"generate function {describe(fn)} returned {SampleName(asked)} with {shorten(sample.status)} as its "
            "status: expected a Sample.Status"
        )
    if sample.status is Sample.Status.PENDING:
        if not (sample.response_length or sample.response or sample.reward is not None):
            raise ValueError(
                f"generate function {describe(fn)} returned {SampleName(asked)} without an answer, and still PENDING: "
                "it must set tokens, response, response_length and status"
            )
        sample.status = Sample.Status.COMPLETED


class SampleName:
    """`sample 3 of group 1`, for errors and task names."""

    def __init__(self, sample: Sample | list[Sample]) -> None:
        self._sample = sample

    def __str__(self) -> str:
        sample = self._sample[0] if isinstance(self._sample, list) else self._sample
        return f"sample {sample.index} of group {sample.group_index}"


def unwrap(fn: Any) -> Any:
    """The user's own function behind an adapter."""
    return fn.fn if isinstance(fn, LegacyRolloutFnAdapter | LegacyGenerateFnAdapter) else fn


def describe(fn: Any) -> str:
    """The dotted name of a plug-in, through the adapters."""
    return name_of(unwrap(fn))


def shorten(value: Any, limit: int = 200) -> str:
    """The value's type and the head of its repr, for error messages."""
    text = repr(value)
    return f"{type(value).__name__}: {text if len(text) <= limit else text[:limit] + '...'}"
