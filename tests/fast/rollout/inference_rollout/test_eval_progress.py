"""An evaluation that stands still is told of, and ended where a flag says so; one that is slow is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from miles.rollout._fully_async_errors import NoProgress
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput
from miles.rollout.inference_rollout import eval_progress
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
from miles.utils.eval_config import EvalDatasetConfig
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer, make_args
from tests.fast.virtual_time import virtual

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT = 100.0
SECONDS = {"A": 70.0, "B": 140.0, "C": 230.0}
"""How long the answers take. The longest gap is that before C."""


class Answers:
    """A generate function that never answers `stuck`, and gives up `grace` seconds after it was cancelled."""

    def __init__(self) -> None:
        self.stuck = ""
        self.grace = 0.0
        self.cancelled: list[str] = []

    async def __call__(self, args: Any, sample: Sample, sampling_params: Any, evaluation: bool = False) -> Sample:
        try:
            await asyncio.sleep(1e9 if sample.prompt == self.stuck else SECONDS[sample.prompt])
        except asyncio.CancelledError:
            self.cancelled.append(sample.prompt)
            await asyncio.sleep(self.grace)
            raise
        sample.response, sample.response_length, sample.status = "yes", 1, Sample.Status.COMPLETED
        return sample


@pytest.fixture
def answers() -> Iterator[Answers]:
    async def reward(args: Any, sample: Sample, **keywords: Any) -> float:
        return 1.0

    made = Answers()

    async def generate(args: Any, sample: Sample, sampling_params: Any, evaluation: bool = False) -> Sample:
        return await made(args, sample, sampling_params, evaluation)

    with function_registry.temporary("test:reward", reward), function_registry.temporary("test:answers", generate):
        yield made


def evaluation(tmp_path: Path, **flags: Any) -> InferenceRolloutFn:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": prompt}) + "\n" for prompt in SECONDS))
    own = {
        "custom_rm_path": "test:reward",
        "custom_generate_function_path": "test:answers",
        "eval_datasets": [EvalDatasetConfig("letters", str(path))],
        "fully_async": True,
        "no_progress_timeout": LIMIT,
    }
    args = make_args(**own | flags)
    fn = InferenceRolloutFn(RolloutFnConstructorInput(args, None))
    fn.state.tokenizer, fn.state.processor = CharTokenizer(), None  # type: ignore[misc]
    return fn


def time() -> float:
    return asyncio.get_running_loop().time()


async def the_error(fn: InferenceRolloutFn, monkeypatch: pytest.MonkeyPatch) -> str:
    async def router(url: str) -> Any:
        return {"workers": [{"url": "http://engine-1"}, {"url": "http://engine-2"}]}

    monkeypatch.setattr(eval_progress, "get", router)
    with pytest.raises(NoProgress) as raised:
        await fn(RolloutFnEvalInput(3))
    return str(raised.value)


@virtual
async def test_an_evaluation_that_stands_still_is_ended_and_named(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.stuck = "B"
    assert await the_error(evaluation(tmp_path), monkeypatch) == (
        "evaluation: no finished sample for 100 s, the limit of --no-progress-timeout; 1 of 3 are finished\n"
        "  data set letters waits for samples 1, 2\n"
        "  engines behind the router: http://engine-1, http://engine-2"
    )
    assert time() == SECONDS["A"] + LIMIT and answers.cancelled == ["B", "C"]


@virtual
async def test_an_evaluation_whose_samples_come_in_time_may_last(answers: Answers, tmp_path: Path) -> None:
    output = await evaluation(tmp_path)(RolloutFnEvalInput(3))
    assert output.data["letters"]["rewards"] == [1.0] * 3 and time() == 230.0 > 2 * LIMIT


@virtual
async def test_an_evaluation_that_ignores_its_cancellation_is_left_behind(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers.stuck, answers.grace = "A", 60.0
    assert "0 of 3 are finished" in await the_error(evaluation(tmp_path, no_progress_timeout=20.0), monkeypatch)
    assert time() == 20.0 + eval_progress.GRACE_SECS
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.message == "an evaluation still runs 5 s after it was cancelled; it is left behind"
    await asyncio.sleep(120)


@pytest.mark.parametrize("flags", [{"no_progress_timeout": None}, {"fully_async": False}])
@virtual
async def test_without_a_limit_it_waits_and_warns(
    answers: Answers, tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, Any]
) -> None:
    answers.stuck = "A"
    evaluating = asyncio.create_task(evaluation(tmp_path, **flags)(RolloutFnEvalInput(3)))
    await asyncio.sleep(1000)
    evaluating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await evaluating
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings[0] == (
        "evaluation: no finished sample for 30 s, 0 of 3 are finished; data set letters waits for samples 0, 1, 2"
    )
    assert "for 760 s, 2 of 3 are finished" in warnings[-1]
    assert answers.cancelled == ["A"]


@virtual
async def test_an_error_of_a_sample_is_raised_as_it_is(answers: Answers, tmp_path: Path) -> None:
    async def failing(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        raise LookupError("plug-in")

    with function_registry.temporary("test:failing", failing), pytest.raises(LookupError, match="plug-in"):
        await evaluation(tmp_path, custom_generate_function_path="test:failing")(RolloutFnEvalInput(3))
