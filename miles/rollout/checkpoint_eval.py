"""Evaluating a checkpoint directory with code of one's own: `--eval-function-path my_module.MyEval`.

    class MyEval(CheckpointEvalFn):
        async def __call__(self, input: RolloutFnEvalInput) -> RolloutFnEvalOutput:
            score = await my_harness(input.hf_dir)
            return RolloutFnEvalOutput(data={}, metrics={"eval/my_benchmark": score})

A class that derives from `CheckpointEvalFn` is called with snapshots of the trainer's weights, in a process of its own,
while training goes on. It brings whatever it generates with: miles starts no engines for it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput

_REASON = re.compile(r"[a-z0-9_]+")


class CheckpointEvalFn(ABC):
    """Base class of evaluations of a checkpoint.

    Built once, from the run's flags. It has no data source: `input.data_source` refuses every call.
    """

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.args = input.args

    @abstractmethod
    def __call__(self, input: RolloutFnEvalInput) -> Any:
        """Evaluate the Hugging Face checkpoint in `input.hf_dir`, whose weights are `input.weight_version`.

        Returns a RolloutFnEvalOutput, or is a coroutine function that does. The directory stays until the call ends.
        One call runs at a time. May raise EvalSkipped; any other exception is reported and counted as a crash.
        Neither ends the training.
        """


class EvalSkipped(Exception):
    """This evaluation has no result. `reason` (lower case letters, digits, _) becomes `eval/skipped_<reason>`."""

    def __init__(self, reason: str, message: str = "") -> None:
        if not _REASON.fullmatch(reason):
            raise ValueError(f"EvalSkipped: reason must be made of a-z, 0-9 and _, got {reason!r}")
        super().__init__(reason, message)  # both, so that it survives being pickled
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return self.message or self.reason
