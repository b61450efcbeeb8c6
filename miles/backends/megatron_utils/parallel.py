"""The trainer's process group and megatron-core's parallel layout of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from miles.utils.process_group import connect_store

if TYPE_CHECKING:
    from argparse import Namespace


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the model-parallel dimensions; data parallelism takes the ranks that are left."""

    tensor: int
    pipeline: int
    context: int
    expert: int

    @staticmethod
    def from_args(args: Namespace, world_size: int) -> ParallelLayout:
        """Raises ValueError where the sizes do not divide `world_size`, or where a dimension is not supported yet."""
        layout = ParallelLayout(
            tensor=getattr(args, "tensor_model_parallel_size", None) or 1,
            pipeline=getattr(args, "pipeline_model_parallel_size", None) or 1,
            context=getattr(args, "context_parallel_size", None) or 1,
            expert=getattr(args, "expert_model_parallel_size", None) or 1,
        )
        for flag, size in (
            ("--tensor-model-parallel-size", layout.tensor),
            ("--pipeline-model-parallel-size", layout.pipeline),
            ("--context-parallel-size", layout.context),
            ("--expert-model-parallel-size", layout.expert),
        ):
            if size != 1:
                raise ValueError(f"{flag} must be 1 in this version, got {size}: the trainer is data parallel only")
        return layout

    def data_size(self, world_size: int) -> int:
        return world_size // (self.tensor * self.pipeline * self.context)


def initialize_distributed(
    args: Namespace, layout: ParallelLayout, *, rank: int, world_size: int, master_addr: str, master_port: int
) -> None:
    """Join the default process group (nccl with CUDA, gloo without) and set up megatron-core's groups and seeds.

    Waits until all ranks have joined; raises after `--distributed-timeout-minutes`.
    """
    on_gpu = torch.cuda.is_available()
    timeout = timedelta(minutes=getattr(args, "distributed_timeout_minutes", None) or 10)
    if not dist.is_initialized():
        dist.init_process_group(
            backend="nccl" if on_gpu else "gloo",
            store=connect_store(master_addr, master_port, rank=rank, world_size=world_size, timeout=timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        create_gloo_process_groups=on_gpu,
    )
    seed = getattr(args, "seed", 1234)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def shutdown_distributed() -> None:
    """Undo `initialize_distributed`; safe to call twice."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def data_parallel_group() -> Any:
    return parallel_state.get_data_parallel_group()


def sum_over_data_parallel(values: torch.Tensor) -> torch.Tensor:
    """All-reduce in place over the data-parallel ranks; free where there is only one."""
    if parallel_state.get_data_parallel_world_size() > 1:
        dist.all_reduce(values, group=data_parallel_group())
    return values


def max_over_data_parallel(value: int) -> int:
    """The largest `value` of the data-parallel ranks; a collective, free where there is only one rank."""
    if parallel_state.get_data_parallel_world_size() == 1:
        return value
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.tensor([value], device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=data_parallel_group())
    return int(tensor)


def data_parallel_rank() -> int:
    return int(parallel_state.get_data_parallel_rank())


def barrier() -> None:
    """Wait for all ranks."""
    if dist.get_world_size() > 1:
        dist.barrier()
