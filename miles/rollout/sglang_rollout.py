"""The function-style entry points that older scripts name; a facade over `miles.rollout.inference_rollout`.

`GenerateState(args)` here returns the one state of the process, which the functions of this module use for training.
Evaluation has a state of its own, so that it shares neither slots nor the abort flag with training.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from miles.rollout.base_types import (
    GenerateFnInput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnOutput,
    RolloutFnTrainInput,
)
from miles.rollout.generate_hub import single_turn
from miles.rollout.generate_utils.generate_endpoint_utils import address_url, router_url
from miles.rollout.inference_rollout import inference_rollout_common as common
from miles.rollout.inference_rollout.compatibility import call_generate_function
from miles.utils.async_utils import run
from miles.utils.misc import SingletonMeta

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.rollout.data_source import DataSource
    from miles.utils.types import Sample

__all__ = ["GenerateState", "generate", "generate_rollout", "get_model_url"]


class GenerateState(common.GenerateState, metaclass=SingletonMeta):
    """The process's generation state: made by the first call, returned by every later one."""

    @cached_property
    def eval_state(self) -> common.GenerateState:
        """The separate state of evaluation."""
        return common.GenerateState(self.args)

    @cached_property
    def eval_prompt_dataset_cache(self) -> dict[Any, Any]:
        """Evaluation data sets that are loaded already."""
        return {}


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Answer one sample with one request; a sample with a partial answer goes on from it. No reward."""
    input = GenerateFnInput(
        state=GenerateState(args), sample=sample, sampling_params=dict(sampling_params), evaluation=False
    )
    result: Sample = await call_generate_function(single_turn.generate, input)
    return result


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnOutput:
    """One training batch, or one evaluation of all data sets. Blocks; call it from outside the rollout event loop."""
    state = GenerateState(args)
    fn = common.InferenceRolloutFn(
        RolloutFnConstructorInput(args=args, data_source=data_source), state.eval_state if evaluation else state
    )
    fn.eval_prompt_dataset_cache = state.eval_prompt_dataset_cache
    input = RolloutFnEvalInput(rollout_id) if evaluation else RolloutFnTrainInput(rollout_id)
    return run(fn(input))


def get_model_url(args: Namespace, model_name: str, endpoint: str = "/generate") -> str:
    """The address of `endpoint` for one of several served models; the run's router where there is only one.

    `args.sglang_model_routers` maps model names to (ip, port). Raises ValueError for a name that is not in it.
    """
    routers = getattr(args, "sglang_model_routers", None)
    if not routers:
        return router_url(args, endpoint)
    if model_name not in routers:
        raise ValueError(f"there is no router for the model {model_name!r}; there are {', '.join(sorted(routers))}")
    ip, port = routers[model_name]
    return address_url(ip, port, endpoint)
