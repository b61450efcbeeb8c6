"""One evaluation: call the function, turn what it returns into metrics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.ray.rollout.metrics import eval_metrics
from miles.rollout.checkpoint_eval import EvalSkipped
from miles.rollout.inference_rollout.compatibility import call_rollout_function

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.rollout.base_types import RolloutFnEvalInput, RolloutFnEvalOutput


def evaluate(args: Namespace, fn: Any, log_eval: Any, input: RolloutFnEvalInput) -> dict[str, float]:
    """The metrics of one call of the evaluation function; blocks. Raises what the function raised.

    `log_eval` is the user's own logging function, or None. Raises EvalSkipped where some answer was not written by the
    weights that `input` pins.
    """
    output: RolloutFnEvalOutput = call_rollout_function(fn, input)
    if input.generate_state is not None and input.weight_version is not None:
        check_versions(output.data, input.weight_version)
    metrics = dict(output.metrics or {})
    if log_eval is not None and log_eval(input.rollout_id, args, output.data, metrics):
        return metrics
    return metrics | eval_metrics(args, output.data)


def check_versions(data: dict[str, dict[str, Any]], version: str) -> None:
    """Raise EvalSkipped unless `version` wrote every answer whose writer is known."""
    for name, result in data.items():
        for sample in result.get("samples") or []:
            if set(map(str, sample.weight_versions)) - {version}:
                raise EvalSkipped(
                    "version_mismatch",
                    f"data set {name}: sample {sample.index} was written by the weights "
                    f"{', '.join(map(str, sample.weight_versions))} instead of {version}",
                )


def check_checkpoint(directory: str) -> None:
    """Raise EvalSkipped unless `directory` holds a Hugging Face checkpoint that this process can see."""
    path = Path(directory)
    missing = [what for what in ("config.json", "*.safetensors") if not any(path.glob(what))]
    if missing:
        raise EvalSkipped(
            "ckpt_missing",
            f"{directory} has no {' and no '.join(missing)}; trainers and evaluation must both see --eval-hf-dir",
        )
