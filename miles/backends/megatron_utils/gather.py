"""Puts the whole model together from the shards of all trainer ranks, a bucket at a time.

    every rank:   its shard of each parameter --packed into one message a bucket--> the rank that wants the parameter
    that rank:    messages of all owners --unpacked, merged--> Hugging Face names and full tensors

Who owns what is told once, when the plan is made. From then on every rank goes through the same buckets in the same
order, sends what it owns, and only the ranks that a bucket is for get anything. One message from each owner is all that
travels: no rank but the receiver ever holds a whole parameter, and ranks whose data-parallel twins own the same shards
only keep in step. The same plan moves whatever has the shape of the parameters, as optimizer moments do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from miles.backends.megatron_utils.converter import ParamSpec, unshard
from miles.backends.megatron_utils.weights import local_params
from miles.utils.grouping import groups_up_to

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from miles.backends.megatron_utils.hf_config import HFModelConfig

NamedTensor = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class GlobalParam:
    """A parameter of the whole model."""

    name: str
    spec: ParamSpec
    owners: tuple[int, ...]
    """The global rank that sends each shard, in the order of the shards."""
    shape: tuple[int, ...]
    """Of one shard."""
    dtype: torch.dtype

    @property
    def shard_elements(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class GatherPlan:
    """All parameters of the model, in an order that every rank agrees on. Tied copies and replicas are left out."""

    params: tuple[GlobalParam, ...]

    @staticmethod
    def make(stages: Sequence[torch.nn.Module], hf: HFModelConfig) -> GatherPlan:
        """A collective of all ranks, once for a model."""
        own = [
            (local.name, local.spec, local.tensor_rank, tuple(local.parameter.shape), local.parameter.dtype)
            for local in local_params(stages, hf)
            if not local.is_copy and _sends(local.spec)
        ]
        everyone: list[list[tuple[str, ParamSpec, int, tuple[int, ...], torch.dtype]]] = [own]
        if dist.get_world_size() > 1:
            everyone = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyone, own)
        # Expert-parallel ranks count their experts from zero, so the Hugging Face names are what tells them apart.
        found: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        about: dict[tuple[str, ...], tuple[str, ParamSpec, tuple[int, ...], torch.dtype]] = {}
        for rank, described in enumerate(everyone):
            for name, spec, tensor_rank, shape, dtype in described:
                found.setdefault(spec.hf_names, []).append((tensor_rank, rank))
                about[spec.hf_names] = (name, spec, shape, dtype)
        return GatherPlan(
            tuple(
                GlobalParam(name, spec, tuple(rank for _, rank in sorted(found[key])), shape, dtype)
                for key, (name, spec, shape, dtype) in about.items()
            )
        )

    @property
    def writers(self) -> tuple[int, ...]:
        """The ranks among which the whole model is shared out for writing: the first owner of each parameter."""
        return tuple(sorted({param.owners[0] for param in self.params}))

    def of_writer(self, rank: int) -> GatherPlan:
        """The parameters that this rank writes."""
        return GatherPlan(tuple(param for param in self.params if param.owners[0] == rank))

    def only(self, names: Collection[str]) -> GatherPlan:
        """The parameters with these first Hugging Face names."""
        return GatherPlan(tuple(param for param in self.params if param.spec.hf_names[0] in names))

    def buckets(self, max_bytes: int, dtype: torch.dtype | None = None) -> Iterator[list[GlobalParam]]:
        """Consecutive parameters whose full tensors have `max_bytes` together at most, unless one alone has more.

        `dtype`: of what is moved, where it is not the parameters themselves.
        """

        def nbytes(param: GlobalParam) -> int:
            return param.shard_elements * len(param.owners) * (dtype or param.dtype).itemsize

        return groups_up_to(max_bytes, self.params, nbytes)


def gathered_weights(
    plan: GatherPlan, model: Sequence[torch.nn.Module], hf: HFModelConfig, max_bytes: int
) -> Iterator[list[NamedTensor]]:
    """Hugging Face names and full weights, a bucket at a time: on rank 0; the other ranks get empty lists.

    A collective of all trainer ranks, which must take every bucket, in lockstep. The tensors are new or detached views
    of the parameters: to be used before the next optimizer step.
    """
    own = {local.spec.hf_names: local.parameter.detach() for local in local_params(model, hf) if not local.is_copy}
    for bucket in plan.buckets(max_bytes):
        yield collect(bucket, own, hf)


def collect(
    bucket: Sequence[GlobalParam],
    own: Mapping[tuple[str, ...], torch.Tensor],
    hf: HFModelConfig,
    *,
    target: int = 0,
    dtype: torch.dtype | None = None,
) -> list[NamedTensor]:
    """The full Hugging Face tensors of a bucket on rank `target`, an empty list on the others; a collective of them and
    of the owners. `own`: this rank's shards by the Hugging Face names that they are made from."""
    rank = dist.get_rank()
    if rank != target:
        mine = [own[param.spec.hf_names] for param in bucket if rank in param.owners]
        if mine:
            dist.send(_packed(mine), dst=target)
        return []
    senders = sorted({owner for param in bucket for owner in param.owners} - {target})
    messages = {sender: _receive(bucket, sender, own, dtype) for sender in senders}
    named: list[NamedTensor] = []
    for param in bucket:
        shards = [
            own[param.spec.hf_names] if owner == target else messages[owner].take(param) for owner in param.owners
        ]
        named.extend(zip(param.spec.hf_names, unshard(param.spec, shards, hf), strict=True))
    return named


class _Message:
    """What one owner has sent for a bucket; taken out in the bucket's order."""

    def __init__(self, data: torch.Tensor, dtype: torch.dtype | None) -> None:
        self._data = data
        self._dtype = dtype
        self._position = 0

    def take(self, param: GlobalParam) -> torch.Tensor:
        dtype = self._dtype or param.dtype
        start = self._position
        self._position += _padded(param.shard_elements * dtype.itemsize)
        part = self._data[start : start + param.shard_elements * dtype.itemsize]
        return part.view(dtype).view(param.shape)


def _receive(
    bucket: Sequence[GlobalParam], sender: int, own: Mapping[tuple[str, ...], torch.Tensor], dtype: torch.dtype | None
) -> _Message:
    nbytes = sum(
        _padded(param.shard_elements * (dtype or param.dtype).itemsize) for param in bucket if sender in param.owners
    )
    data = torch.empty(nbytes, dtype=torch.uint8, device=_device(own))
    dist.recv(data, src=sender)
    return _Message(data, dtype)


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of the tensors one after the other, each from a multiple of eight on (so that they can be viewed)."""
    parts = []
    for tensor in tensors:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        parts.append(flat)
        if missing := _padded(flat.numel()) - flat.numel():
            parts.append(flat.new_zeros(missing))
    return torch.cat(parts)


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _device(own: Mapping[tuple[str, ...], torch.Tensor]) -> torch.device:
    return next((tensor.device for tensor in own.values()), torch.device("cpu"))


def _sends(spec: ParamSpec) -> bool:
    """Whether this rank is the one among its replicas that sends such a parameter."""
    if spec.is_expert:
        replica = parallel_state.get_expert_data_parallel_rank()
    else:
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if spec.split.is_whole and _tensor_rank(spec) != 0:
        return False
    return int(replica) == 0


def _tensor_rank(spec: ParamSpec) -> int:
    if spec.is_expert:
        return int(parallel_state.get_expert_tensor_parallel_rank())
    return int(parallel_state.get_tensor_model_parallel_rank())
