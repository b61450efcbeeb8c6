"""The optimizer's state under Hugging Face names, whole on save and this rank's part of it on load.

    torch optimizer's state of each parameter: moments, float32 master weights, a step counter
        --save: joined over data-parallel ranks (distributed optimizer), gathered like weights--> "<hf name>|<field>"
        --load: cut like weights, then to this rank's range--> the state of a torch optimizer that was never stepped

The state moves as values, never as megatron-core's own checkpoint objects: those need Transformer Engine or Apex for
the distributed optimizer (its empty state fails an assertion, and every parameter would share one step counter, which
silently makes the training diverge).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from miles.backends.megatron_utils.converter import shard
from miles.backends.megatron_utils.weights import local_params

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from miles.backends.megatron_utils.gather import GlobalParam
    from miles.backends.megatron_utils.hf_config import HFModelConfig
    from miles.backends.megatron_utils.weights import LocalParam

MASTER = "master"
"""The field of float32 master weights; the other fields are the torch optimizer's."""
_MASTER_IN_STATE = "master_param"
Scalars = dict[str, dict[str, float]]
"""{field of the torch optimizer's state: {first Hugging Face name of the parameter: value}}"""


@dataclass(frozen=True)
class OptimizedParam:
    """A parameter of this rank and what the optimizer keeps of it here."""

    local: LocalParam
    optimizer: torch.optim.Optimizer
    optimized: torch.Tensor | None
    """What is updated: the parameter, its float32 copy, or a flat range of one of them. None: nothing is kept here."""
    start: int
    """Where in the flattened parameter `optimized` begins."""
    data_group: dist.ProcessGroup | None
    """The ranks that share the parameter's state among them; None: this rank has all of it."""
    holds_master: bool = False
    """The optimizer itself holds the float32 master weights, in its state (precision-aware, or in CPU memory)."""

    @property
    def fields(self) -> dict[str, torch.Tensor]:
        """The state that has an entry for each weight here, flat."""
        if self.optimized is None:
            return {}
        state = self.optimizer.state.get(self.optimized, {})
        tensors = {
            MASTER if name == _MASTER_IN_STATE else name: value.detach().view(-1)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.numel() == self.optimized.numel() and value.dim() > 0
        }
        if self._has_master:
            tensors[MASTER] = self.optimized.detach().view(-1)
        return tensors

    @property
    def scalars(self) -> dict[str, float]:
        if self.optimized is None:
            return {}
        state = self.optimizer.state.get(self.optimized, {})
        return {
            name: float(value)
            for name, value in state.items()
            if value is not None and not (isinstance(value, torch.Tensor) and value.dim() > 0)
        }

    @property
    def _has_master(self) -> bool:
        return self.optimized is not None and self.optimized.dtype != self.local.parameter.dtype

    def whole(self, field: str) -> torch.Tensor:
        """The field for all weights of the parameter that tensor-parallel rank has; a collective of `data_group`."""
        own = self.fields.get(field)
        shape = self.local.parameter.shape
        if self.data_group is None:
            assert own is not None
            return own.view(shape)
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=self.local.parameter.device)
        if own is not None:
            whole[self.start : self.start + own.numel()] = own
        dist.all_reduce(whole, group=self.data_group)
        return whole.view(shape)

    def restore(self, wholes: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> None:
        """Take this rank's part of each field. The step counter is a tensor of its own for each parameter."""
        if self.optimized is None:
            return
        # An offloaded optimizer's state goes straight to where it will lie: on the GPU it would not fit.
        offloaded = isinstance(self.optimizer, HybridDeviceOptimizer)
        device = torch.device("cpu") if offloaded else self.optimized.device
        entry: dict[str, Any] = {name: torch.tensor(value) for name, value in scalars.items()}
        for field, whole in wholes.items():
            part = whole.reshape(-1)[self.start : self.start + self.optimized.numel()].view(self.optimized.shape)
            if field == MASTER and self.holds_master:
                entry[_MASTER_IN_STATE] = part.to(device, torch.float32, copy=True)
            elif field == MASTER:
                self.optimized.detach().copy_(part)
            else:
                entry[field] = part.to(device, copy=True)
        if entry:
            self.optimizer.state[self.optimized] = entry


class OptimizerState:
    """The state of all parameters of this rank."""

    def __init__(self, optimizer: Any, stages: Sequence[torch.nn.Module], hf: HFModelConfig) -> None:
        self._hf = hf
        self._inner = [inner for inner in optimizer.chained_optimizers if not inner.is_stub_optimizer]
        places = _places(self._inner)
        # The copy of a tied embedding is optimized like the embedding itself; on load it gets the same state.
        self.params = [
            OptimizedParam(local, *places[local.parameter])
            for local in local_params(stages, hf)
            if local.parameter in places
        ]
        self._by_names = {param.local.spec.hf_names: param for param in self.params if not param.local.is_copy}

    def fields(self) -> dict[str, set[str]]:
        """{field: the parameters that have it on any rank, by their first Hugging Face name}; a collective."""
        own = {(name, param.local.spec.hf_names[0]) for param in self.params for name in param.fields}
        fields: dict[str, set[str]] = {}
        for name, parameter in sorted(set().union(*_from_all_ranks(own))):
            fields.setdefault(name, set()).add(parameter)
        return fields

    def scalars(self) -> Scalars:
        """The scalars of the whole model; a collective."""
        own: Scalars = {}
        for param in self.params:
            for name, value in param.scalars.items():
                own.setdefault(name, {})[param.local.spec.hf_names[0]] = value
        merged: Scalars = {}
        for part in _from_all_ranks(own):
            for name, values in part.items():
                merged.setdefault(name, {}).update(values)
        return merged

    def wholes(self, bucket: Sequence[GlobalParam], field: str) -> dict[tuple[str, ...], torch.Tensor]:
        """The field of those parameters of `bucket` that this rank has or shares, to be gathered; a collective."""
        here = [self._by_names[param.spec.hf_names] for param in bucket if param.spec.hf_names in self._by_names]
        return {param.local.spec.hf_names: param.whole(field) for param in here}

    @torch.no_grad()
    def restore(self, read: Callable[[str], torch.Tensor | None], fields: Sequence[str], scalars: Scalars) -> None:
        """Fill the torch optimizers. `read`: the full tensor "<hf name>|<field>", or None where there is none."""
        for inner in self._inner:
            inner.optimizer.state.clear()
        for param in self.params:
            spec = param.local.spec
            wholes = {}
            for field in fields:
                parts = [read(f"{name}|{field}") for name in spec.hf_names]
                if all(part is not None for part in parts):
                    tensors = [part for part in parts if part is not None]
                    wholes[field] = shard(
                        spec, tensors, self._hf, rank=param.local.tensor_rank, size=param.local.tensor_size
                    )
            param.restore(wholes, _scalars_of(param.local, scalars))
        for inner in self._inner:
            if isinstance(inner.optimizer, HybridDeviceOptimizer) and inner.optimizer.state:
                inner.optimizer._sync_hdo_state_to_sub_optimizers()


def _scalars_of(local: LocalParam, scalars: Scalars) -> dict[str, float]:
    """Kept by Hugging Face name; sets of earlier versions have megatron-core's names."""
    found = {}
    for field, values in scalars.items():
        value = values.get(local.spec.hf_names[0], values.get(local.name))
        if value is not None:
            found[field] = value
    return found


Place = tuple[torch.optim.Optimizer, torch.Tensor | None, int, "dist.ProcessGroup | None", bool]


def _places(inner_optimizers: Sequence[Any]) -> dict[torch.nn.Parameter, Place]:
    """What each optimizer keeps of each model parameter on this rank."""
    places: dict[torch.nn.Parameter, Place] = {}
    for inner in inner_optimizers:
        places.update(_distributed(inner) if isinstance(inner, DistributedOptimizer) else _replicated(inner))
    return places


def _replicated(inner: Any) -> Iterator[tuple[torch.nn.Parameter, Place]]:
    """Every data-parallel rank has the whole state. Master weights hang on the parameters, in the same order."""
    optimized = {id(parameter) for group in inner.optimizer.param_groups for parameter in group["params"]}
    if hasattr(inner, "float16_groups"):
        for model_group, master_group in zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True):
            for parameter, master in zip(model_group, master_group, strict=True):
                yield parameter, (inner.optimizer, master, 0, None, False)
        plain = [parameter for group in inner.fp32_from_fp32_groups for parameter in group]
    else:
        plain = [parameter for group in inner.optimizer.param_groups for parameter in group["params"]]
    for parameter in plain:
        assert id(parameter) in optimized
        yield parameter, (inner.optimizer, parameter, 0, None, False)


def _distributed(inner: Any) -> Iterator[tuple[torch.nn.Parameter, Place]]:
    """Each data-parallel rank has a flat range of some parameters, and nothing of others."""
    group = inner.data_parallel_group
    for buffer in inner.buffers:
        for parameter in buffer.param_index_map:
            yield parameter, (inner.optimizer, None, 0, group, False)
    holds_master = inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    low_precision = inner.shard_float16_groups if holds_master else inner.shard_fp32_from_float16_groups
    for model_groups, shard_groups, held in (
        (inner.model_float16_groups, low_precision, holds_master),
        (inner.model_fp32_groups, inner.shard_fp32_groups, False),
    ):
        for parameters, shards in zip(model_groups, shard_groups, strict=True):
            for parameter, part in zip(parameters, shards, strict=True):
                start = inner._get_model_param_range_map(parameter)["param"].start
                yield parameter, (inner.optimizer, part, start, group, held)


def _from_all_ranks(value: Any) -> list[Any]:
    everyone = [value]
    if dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value)
    return everyone
