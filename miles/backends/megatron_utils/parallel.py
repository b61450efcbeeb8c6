"""The trainer's process group and megatron-core's parallel layout of it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from miles.utils.process_group import connect_store

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.backends.megatron_utils.layout import ParallelLayout


def initialize_distributed(
    args: Namespace, layout: ParallelLayout, *, rank: int, world_size: int, master_addr: str, master_port: int
) -> None:
    """Join the default process group (nccl with CUDA, gloo without) and set up megatron-core's groups and seeds.

    Waits until all ranks have joined; raises after `--distributed-timeout-minutes`, and ValueError at once where a GPU
    is expected and this PyTorch has none.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu and getattr(args, "distributed_backend", None) == "nccl":
        raise ValueError(
            f"the trainer's PyTorch {torch.__version__} sees no CUDA device, and the driver found one. Instead: a build "
            "for CUDA that the machine's driver supports, or CUDA_VISIBLE_DEVICES= for a run without GPUs"
        )
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
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=getattr(args, "distributed_timeout_minutes", None) or 10,
        create_gloo_process_groups=False,
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


def is_last_stage() -> bool:
    """Whether this rank holds the end of the model (and with interleaving one of its other stages)."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """Broadcast in place from the last pipeline stage to the others; every rank passes a tensor of the same size."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return values


def object_from_last_stage(value: Any) -> Any:
    """What the last pipeline stage passes; the others' argument is ignored. A collective, free with one stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    holder = [value]
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(holder, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return holder[0]


def barrier() -> None:
    """Wait for all ranks."""
    if dist.get_world_size() > 1:
        dist.barrier()
