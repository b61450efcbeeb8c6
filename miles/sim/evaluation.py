"""Evaluation on the engines that training shares: the real `eval_rollout`, while the real gate holds submission back.

async with fn.submission_paused():        nothing new is pulled; what is in flight goes on
    eval_rollout ---> EnginePool          it ends, fails at one sample, or is cancelled
submission goes on
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
from miles.rollout.inference_rollout.inference_rollout_eval import eval_rollout
from miles.sim.faults import SimulatedError
from miles.sim.plugins import IN_EVALUATION
from miles.sim.schedule import Fault, FaultKind
from miles.utils.eval_config import EvalDatasetConfig
from miles.utils.http_errors import HttpRequestError
from miles.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miles.rollout.fully_async_rollout import FullyAsyncRolloutFn
    from miles.sim.engines import EnginePool
    from miles.sim.observer import Observer
    from miles.sim.trace import Trace

PROMPTS, SAMPLES_OF_A_PROMPT = 2, 2
_DATA_SET = EvalDatasetConfig("simulated", "simulated", n_samples_per_eval_prompt=SAMPLES_OF_A_PROMPT)


class _Prompts:
    samples = tuple(Sample(prompt=f"e{i}", metadata={IN_EVALUATION: True}) for i in range(PROMPTS))


class SharedEngineEvaluation:
    """The evaluations of one process."""

    def __init__(self, args: Namespace, engines: EnginePool, observer: Observer, trace: Trace) -> None:
        self._args = Namespace(**{**vars(args), "eval_datasets": [_DATA_SET], "hf_checkpoint": "simulated"})
        self._state = GenerateState(self._args)
        self._data: Any = {(_DATA_SET.cache_key, "simulated", False, None): _Prompts()}
        self._engines = engines
        self._observer = observer
        self._trace = trace
        self._pauses: list[tuple[float, float]] = []

    def paused_since(self, moment: float) -> float:
        """Seconds since then during which submission was paused."""
        return sum(max(0.0, end - max(start, moment)) for start, end in self._pauses)

    async def run(self, fn: FullyAsyncRolloutFn, step: int, fault: Fault) -> None:
        """One evaluation after `step`; how it ends is in the trace."""
        loop = asyncio.get_running_loop()
        self._trace.add("eval start", step)
        began = loop.time()
        self._pauses.append((began, float("inf")))
        try:
            async with fn.submission_paused():
                pulled = self._observer.counts["pulled"]
                try:
                    await self._evaluate(fault)
                finally:
                    if self._observer.counts["pulled"] != pulled:
                        self._trace.violate("a group is submitted while evaluation has paused submission")
        except (SimulatedError, HttpRequestError) as error:
            self._trace.add("eval failed", step, type(error).__name__)
        except TimeoutError:
            self._trace.add("eval cancelled", step)
        except ValueError as error:
            if not self._args.group_rm:
                raise
            self._trace.add("eval refused", step, type(error).__name__)
        finally:
            self._pauses[-1] = (began, loop.time())
            self._engines.eval_fails_at = None
        if self._engines.evaluating:
            self._trace.violate(f"evaluation leaves {self._engines.evaluating} requests behind")
        self._trace.add("eval end", step)

    async def _evaluate(self, fault: Fault) -> None:
        version = self._engines.versions.current
        if fault.kind is FaultKind.EVAL_FAILS:
            self._engines.eval_fails_at = int(fault.seconds * 10) % (PROMPTS * SAMPLES_OF_A_PROMPT)
        async with asyncio.timeout(fault.seconds / 20 if fault.kind is FaultKind.EVAL_CANCELLED else None):
            result = await eval_rollout(self._state, self._data)
        samples = result["simulated"]["samples"]
        if len(samples) != PROMPTS * SAMPLES_OF_A_PROMPT or any(sample.reward is None for sample in samples):
            self._trace.violate(f"evaluation comes back with {len(samples)} samples")
        if old := [v for v in self._versions(samples) if v != version]:
            self._trace.violate(f"evaluation of version {version} has answers of the versions {old}")

    def _versions(self, samples: list[Sample]) -> Iterator[int]:
        for sample in samples:
            yield from {ordinal for ordinal, _ in self._engines.answers[sample.response].spans}
