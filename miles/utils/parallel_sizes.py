"""How many ranks share what of a model, by the parallelism flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the model-parallel dimensions; data parallelism takes the ranks that are left."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1
    """Stages that each pipeline rank holds, interleaved; 1: the plain one-forward-one-backward schedule."""
    sequence_parallel: bool = False

    @staticmethod
    def fields_from(args: Namespace) -> dict[str, Any]:
        """The fields, as the flags have them."""
        tensor = getattr(args, "tensor_model_parallel_size", None) or 1
        return {
            "tensor": tensor,
            "pipeline": getattr(args, "pipeline_model_parallel_size", None) or 1,
            "context": getattr(args, "context_parallel_size", None) or 1,
            "expert": getattr(args, "expert_model_parallel_size", None) or 1,
            "expert_tensor": getattr(args, "expert_tensor_parallel_size", None) or tensor,
            "virtual": getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1,
            "sequence_parallel": bool(getattr(args, "sequence_parallel", False)) and tensor > 1,
        }

    def check_world(self, world_size: int) -> None:
        """Raise ValueError where these sizes do not fit `world_size` ranks."""
        model = self.tensor * self.pipeline * self.context
        if world_size % model:
            raise ValueError(
                f"{world_size} trainer ranks are no multiple of --tensor-model-parallel-size x "
                f"--pipeline-model-parallel-size x --context-parallel-size ({self.tensor} x {self.pipeline} x "
                f"{self.context} = {model})"
            )
        experts = self.expert_tensor * self.expert * self.pipeline
        if world_size % experts:
            raise ValueError(
                f"{world_size} trainer ranks are no multiple of --expert-tensor-parallel-size x "
                f"--expert-model-parallel-size x --pipeline-model-parallel-size ({self.expert_tensor} x {self.expert} "
                f"x {self.pipeline} = {experts})"
            )
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(
                f"--num-virtual-stages-per-pipeline-rank {self.virtual} needs --pipeline-model-parallel-size above 1"
            )

    def data_size(self, world_size: int) -> int:
        """Number of data-parallel ranks: those that get different samples."""
        return world_size // (self.tensor * self.pipeline * self.context)


def uneven_pipeline(args: Namespace) -> dict[str, int | None]:
    """How many layers the outer pipeline ranks have; None: as many as the others."""
    return {
        "first_layers": getattr(args, "decoder_first_pipeline_num_layers", None),
        "last_layers": getattr(args, "decoder_last_pipeline_num_layers", None),
    }
