"""New weights on their way in: received or read on a thread of their own, staged, handed over whole.

    begin -> receive, receive, ... -> end     or     read_directory
               (staged, by name)       |                  |
                                       +--- StagedWeights +---> Scheduler.publish, between two steps

Nothing here touches the model. A bucket that fails to arrive drops everything staged and ends the bracket: the old
weights stay. So does destroying a group within a bracket, which is the way out after a trainer died within one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from miles.backends.embedded_engine.errors import ControlError
from miles.backends.embedded_engine.receive_buffer import MemoryPool, ReceiveBuffer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup, Work

logger = logging.getLogger(__name__)

SELECTORS = ("target", "draft", "all")
FLATTENED_BUCKET = "flattened_bucket"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""Types that weights may arrive in, by torch's name; they are cast to the model's."""
_POLL_SECS = 0.0005
_ALIGNMENT = 16
"""Bytes: what kernels that load vectors ask for."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and type of one tensor that is to arrive."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.numel


@dataclass
class StagedWeights:
    """Weights that are complete in themselves and not yet the model's."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By parameter name, in the model's dtype and on its device."""
    version: str | None = None
    """None = the version does not change."""


class WeightReceiver:
    """Used from one thread at a time. Every refusal is a ControlError."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], *, timeout: float) -> None:
        """`parameters`: every name that may arrive (tied ones too) with a tensor of the model's shape, type, device."""
        self._shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        first_names: dict[int, str] = {}
        self._own_name = {name: first_names.setdefault(id(tensor), name) for name, tensor in parameters.items()}
        """The parameter behind each name; the names of tied weights have the same one."""
        first = next(iter(parameters.values()))
        self._dtype, self._device = first.dtype, first.device
        self._timeout = timeout
        self._groups: dict[str, ProcessGroup] = {}
        self._backends: dict[str, str] = {}
        self._staged: StagedWeights | None = None
        self._pool = MemoryPool()

    def begin(self, selector: str) -> None:
        if selector not in SELECTORS:
            raise ControlError(f"selector must be one of {', '.join(SELECTORS)}, got {selector!r}")
        if self._staged is not None:
            raise ControlError(
                "begin_weight_update() was called twice without end_weight_update(); "
                "destroy_weights_update_group drops an update that cannot be finished"
            )
        self._staged = StagedWeights()

    def end(self) -> StagedWeights:
        """Close the bracket; what it staged is the caller's to publish."""
        if self._staged is None:
            raise ControlError("end_weight_update() without begin_weight_update()")
        staged, self._staged = self._staged, None
        self._pool.trim()
        return staged

    def init_group(self, *, address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> None:
        """Join the trainer's group; waits until all of its ranks are there."""
        from miles.utils.process_group import init_process_group

        if name in self._groups:
            raise ControlError(f"Failed to initialize custom process group: {name!r} exists already.")
        if not 0 < rank < world_size:
            raise ControlError(f"rank_offset must be in [1, world_size - 1], got {rank} of {world_size}")
        try:
            self._groups[name] = init_process_group(
                backend=backend,
                init_method=f"tcp://{address}:{port}",
                world_size=world_size,
                rank=rank,
                group_name=name,
                timeout_secs=self._timeout,
            )
        except (RuntimeError, ValueError) as error:
            raise ControlError(f"Failed to initialize custom process group: {error}.") from error
        self._backends[name] = backend

    def destroy_group(self, name: str) -> None:
        from miles.utils.process_group import destroy_process_group

        group = self._groups.pop(name, None)
        if group is None:
            raise ControlError("The group to be destroyed does not exist.")
        if self._staged is not None:
            logger.warning("Group %s is destroyed within a weight update: the update is dropped", name)
            self._staged = None
        if self._backends.pop(name, None) == "nccl":
            group.abort()  # else a broadcast whose sender has died would be waited for
        destroy_process_group(group)

    def receive(
        self,
        specs: list[TensorSpec],
        *,
        group_name: str,
        load_format: str | None,
        version: str | None,
    ) -> None:
        """Receive one bucket from rank 0 of the group and stage it; what is wrong is refused before it is received."""
        staged = self._staged
        if staged is None:
            raise ControlError(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        if group_name not in self._groups:
            raise ControlError(
                f"Failed to receive weights: Group {group_name} not in {list(self._groups)}. "
                "Please call `init_weights_update_group` first."
            )
        if load_format not in (None, FLATTENED_BUCKET):
            raise ControlError(f"load_format must be null or {FLATTENED_BUCKET!r}, got {load_format!r}")
        for spec in specs:
            self._check(spec.name, spec.dtype, spec.shape)
        if repeated := [name for name, times in Counter(spec.name for spec in specs).items() if times > 1]:
            raise ControlError(f"names must be different, these occur more than once: {', '.join(repeated[:5])}.")
        try:
            receive = self._receive_each if load_format is None else self._receive_flattened
            tensors = receive(specs, group_name)
        except (RuntimeError, ValueError) as error:
            self._staged = None
            raise ControlError(
                f"Failed to receive weights: {error}. The update is dropped, the old weights stay."
            ) from error
        staged.tensors.update({self._own_name[name]: self._placed(tensor) for name, tensor in tensors.items()})
        if version is not None:
            staged.version = version

    def read_directory(self, directory: str) -> StagedWeights:
        """Read all *.safetensors of a model directory; every parameter of the model must be there."""
        from safetensors import SafetensorError, safe_open

        if self._staged is not None:
            raise ControlError(
                "update_weights_from_disk must not run between begin_weight_update() and end_weight_update(): the end "
                "would put parts of the other update over it"
            )
        files = sorted(Path(directory).glob("*.safetensors"))
        if not files:
            raise ControlError(f"Failed to get weights iterator: there is no *.safetensors file in {directory!r}.")
        staged = StagedWeights()
        try:
            for file in files:
                with safe_open(file, framework="pt") as content:
                    for name in content.keys():  # noqa: SIM118 - not a dict
                        tensor = content.get_tensor(name)
                        self._check(name, tensor.dtype, tuple(tensor.shape))
                        staged.tensors[self._own_name[name]] = self._placed(tensor)
        except (OSError, SafetensorError) as error:
            raise ControlError(f"Failed to get weights iterator: {error}.") from error
        missing = sorted(set(self._own_name.values()) - staged.tensors.keys())
        if missing:
            raise ControlError(f"{directory!r} lacks {', '.join(missing[:5])}")
        return staged

    def _check(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        expected = self._shapes.get(name)
        if expected is None:
            raise ControlError(f"The model has no parameter {name!r}.")
        if expected != shape:
            raise ControlError(f"{name} must have shape {list(expected)}, got {list(shape)}.")
        if dtype not in DTYPES.values():
            raise ControlError(f"{name} must be of dtype {', '.join(DTYPES)}, got {str(dtype).removeprefix('torch.')}.")

    def _receive_each(self, specs: list[TensorSpec], group_name: str) -> dict[str, torch.Tensor]:
        """One broadcast per tensor, in order."""
        buffers = [self._buffer([spec], group_name) for spec in specs]
        self._broadcast(buffers, group_name)
        return {
            spec.name: buffer.received().view(spec.dtype).view(spec.shape)
            for spec, buffer in zip(specs, buffers, strict=True)
        }

    def _receive_flattened(self, specs: list[TensorSpec], group_name: str) -> dict[str, torch.Tensor]:
        """One broadcast of all tensors' bytes behind each other."""
        buffer = self._buffer(specs, group_name)
        self._broadcast([buffer], group_name)
        flat = buffer.received()
        tensors, offset = {}, 0
        for spec in specs:
            data = flat[offset : offset + spec.nbytes]
            offset += spec.nbytes
            # Where it was received, unless kernels would have to read it off their boundaries. The bucket's memory is
            # let go of when the next update replaces the last of its tensors.
            whole = data if data.data_ptr() % _ALIGNMENT == 0 else data.clone()
            tensors[spec.name] = whole.view(spec.dtype).view(spec.shape)
        return tensors

    def _buffer(self, specs: list[TensorSpec], group_name: str) -> ReceiveBuffer:
        """Memory for one broadcast of `specs`."""
        nccl = self._backends[group_name] == "nccl"
        return ReceiveBuffer(
            sum(spec.numel for spec in specs),
            sum(spec.nbytes for spec in specs),
            device=self._device if nccl else "cpu",
            roomy=not nccl,
            pool=self._pool,
        )

    def _broadcast(self, buffers: list[ReceiveBuffer], group_name: str) -> None:
        from torch.distributed import broadcast

        group = self._groups[group_name]
        on_device = self._backends[group_name] == "nccl"
        works = [broadcast(buffer.memory, group_src=0, group=group, async_op=True) for buffer in buffers]
        for work in works:
            if on_device:
                self._wait_on_device(work)
            work.wait()

    def _wait_on_device(self, work: Work) -> None:
        """NCCL's own `wait` only puts a stream behind the broadcast: the answer to the sender would come before the
        data, and a sender that has died would block every step of the engine."""
        deadline = time.monotonic() + self._timeout
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing arrived within {self._timeout:g} s")
            time.sleep(_POLL_SECS)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._device, dtype=self._dtype)


def parse_specs(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> list[TensorSpec]:
    """The tensors of one bucket; dtypes are names of `DTYPES`, with or without `torch.`. Raises ControlError."""
    if not len(names) == len(dtypes) == len(shapes):
        raise ControlError(
            f"names, dtypes and shapes must be equally long, got {len(names)}, {len(dtypes)} and {len(shapes)}"
        )
    return [
        TensorSpec(name, _dtype(dtype), tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def _dtype(name: str) -> torch.dtype:
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ControlError(f"dtypes must be {', '.join(DTYPES)}, got {name!r}")
    return dtype
