"""Evaluation of snapshots in a Ray actor of its own: what happens here neither slows nor ends training.

evaluate(n, dir, version) --one at a time--> pin the fleet (if there is one) --> evaluation function --> EvalOutcome
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from miles.ray.eval.fleet import EvalFleet
from miles.ray.eval.scores import check_checkpoint, evaluate
from miles.ray.eval.servers import RayEvalServers, fleet_args
from miles.ray.eval.types import EvalOutcome
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput
from miles.rollout.checkpoint_eval import EvalSkipped
from miles.rollout.inference_rollout.compatibility import load_rollout_function
from miles.utils.arguments import resolve_rollout_function_paths
from miles.utils.async_utils import close_async_loop, run
from miles.utils.heartbeat import start_heart
from miles.utils.http_utils import close_http_client, init_http_client
from miles.utils.logging_utils import redirect_output
from miles.utils.misc import load_function

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.ray.placement_group import Bundles
    from miles.utils.heartbeat import Heart

logger = logging.getLogger(__name__)


class EvalManager:
    """See the module docstring. `bundles`: those of the evaluation engines; empty where there are none."""

    def __init__(self, args: Namespace, bundles: Bundles) -> None:
        redirect_output(Path(args.run_dir) / "logs" / "eval_manager.log")
        self._args = args
        self._fleet: EvalFleet | None = None
        if bundles.count:
            self._args = fleet_args(args)
            self._fleet = EvalFleet(self._args, RayEvalServers(self._args, bundles))
        self._turn = asyncio.Lock()

    async def start(self) -> dict[str, int]:
        """Start the fleet and build the evaluation function; process ids by name. Raises where either fails."""
        building = asyncio.to_thread(self._build_eval_function)
        if self._fleet is None:
            await building
            return {"eval_manager": os.getpid()}
        await asyncio.gather(building, self._fleet.start())
        return {"eval_manager": os.getpid(), **await self._fleet.pids()}

    def _build_eval_function(self) -> None:
        args = self._args
        init_http_client(args)
        _, path = resolve_rollout_function_paths(args)
        no_data: Any = NoDataSource()
        self._eval_fn = load_rollout_function(RolloutFnConstructorInput(args=args, data_source=no_data), path)
        self._log_eval = load_function(args.custom_eval_rollout_log_function_path)

    async def heart(self) -> Heart:
        """Begin to answer, beside whatever call there is, whether this process runs; returns where."""
        return start_heart()

    async def evaluate(self, rollout_id: int, hf_dir: str, version: str) -> EvalOutcome:
        """Evaluate the checkpoint in `hf_dir`, whose weights are named `version`."""
        async with self._turn:
            started = time.time()
            metrics: dict[str, float] = {}
            skipped, message = None, ""
            try:
                metrics = await self._evaluate(rollout_id, hf_dir, version)
            except EvalSkipped as error:
                skipped, message = error.reason, str(error)
            except Exception as error:  # whatever a user's function raises costs one point: here it becomes data
                logger.exception("the evaluation of step %d crashed", rollout_id)
                skipped, message = "crashed", f"{type(error).__name__}: {error}"
            return EvalOutcome(metrics, skipped, message, started, time.time())

    async def _evaluate(self, rollout_id: int, hf_dir: str, version: str) -> dict[str, float]:
        check_checkpoint(hf_dir)
        state = await self._fleet.pin(hf_dir, version) if self._fleet is not None else None
        input = RolloutFnEvalInput(rollout_id, generate_state=state, weight_version=version, hf_dir=hf_dir)
        return await asyncio.to_thread(evaluate, self._args, self._eval_fn, self._log_eval, input)

    async def dispose(self) -> None:
        """End the evaluation function and the fleet."""
        await asyncio.gather(
            asyncio.to_thread(self._close_eval_function), *([self._fleet.stop()] if self._fleet is not None else [])
        )

    def _close_eval_function(self) -> None:
        close = getattr(getattr(self, "_eval_fn", None), "close", None)
        if close is not None:
            result = close()
            if asyncio.iscoroutine(result):
                run(result)
        run(close_http_client())
        close_async_loop()


class NoDataSource:
    """Stands where training has its data source: an evaluation of snapshots takes no training prompts."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"data_source.{name}: an evaluation of snapshots has no data source, as it takes no prompts"
        )
