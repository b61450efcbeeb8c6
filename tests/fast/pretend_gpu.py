"""A CUDA device in name only: tensors stay in host memory, but mixing devices fails as it does on a GPU.

    with pretend_gpu():
        rows = torch.arange(4, device="cuda")      # rows.device is cuda:0
        torch.cat([rows, torch.zeros(2)])          # RuntimeError, as on a GPU

Not seen: what a function asks that runs within `Tensor.backward` or `torch.autograd.backward` (recomputation); its
operations are.

Every tensor's memory is marked as the device's or the host's. Two modes of PyTorch do the work: one answers what Python
asks for (`device=`, `.to`, `.cuda`, `.device`), the other looks at each operation that is really run, backward passes
included, and refuses operands of both kinds where CUDA would. What is computed is computed on the CPU, so results are
true; kernels, streams and timing are not there. For tests of code that places tensors, on a machine without a GPU.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEVICE = torch.device("cuda", 0)
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_COPYING = ("aten::copy_",)
_TO_DEVICE, _TYPE_NAME = (getattr(torch._C.TensorBase, name) for name in ("cuda", "type"))
"""megatron-core's CPU shim replaces these two methods of torch.Tensor."""
_HOST_ONLY = (torch.Tensor.numpy, torch.Tensor.__array__)


class _Marks:
    """Which memory is the device's. Keeps it alive, so that no address is used twice."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages


class _Operations(TorchDispatchMode):
    """What is really run."""

    def __init__(self, marks: _Marks) -> None:
        super().__init__()
        self._marks = marks
        self.copies_to_host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if self.copies_to_host or name in _COPYING:
            return func(*args, **kwargs)
        operands = _tensors((args, kwargs))
        on_device = any(map(self._marks.has, operands))
        if on_device:
            if name in _INDEXING and self._marks.has(args[0]):  # the indices of a device tensor may be on the host
                operands = _tensors((args[0], *args[2:]))
            # Empty ones aside: PyTorch itself makes some where the others really are, for gradients that are not there.
            host = [tuple(t.shape) for t in operands if t.dim() > 0 and t.numel() > 0 and not self._marks.has(t)]
            if host:
                raise RuntimeError(f"{name}: Expected all tensors to be on the same device; on the host: {host}")
        result = func(*args, **kwargs)
        if on_device:
            for tensor in _tensors(result):
                self._marks.add(tensor)
        return result


class _Calls(TorchFunctionMode):
    """What Python asks for."""

    def __init__(self, marks: _Marks, operations: _Operations) -> None:
        super().__init__()
        self._marks = marks
        self._operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _QUESTIONS:
            return _QUESTIONS[func](self._marks.has(args[0]), lambda: func(*args))
        if func is _TYPE_NAME and len(args) == 1 and not kwargs:
            name: str = func(*args)
            return name.replace("torch.", "torch.cuda.", 1) if self._marks.has(args[0]) else name
        if func in _HOST_ONLY and self._marks.has(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func in (_TO_DEVICE, torch.Tensor.cpu):
            return self._moved(args[0], DEVICE if func is _TO_DEVICE else torch.device("cpu"))
        kwargs.pop("pin_memory", None)
        args, device = self._take_device(func, args, kwargs)
        result = func(*args, **kwargs)
        return self._moved(result, device) if device is not None and isinstance(result, torch.Tensor) else result

    def _take_device(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, torch.device | None]:
        """The call as one for the CPU, and the device that it names; None where it names neither CPU nor GPU."""
        if func is torch.Tensor.to and len(args) > 1:
            if isinstance(args[1], torch.Tensor):
                return args, DEVICE if self._marks.has(args[1]) else None
            if isinstance(args[1], torch.device | str):
                kwargs["device"] = args[1]
                args = (args[0], None, *args[2:])
        if kwargs.get("device") is None:
            return args, None
        device = torch.device(kwargs["device"])
        known = device.type in ("cpu", "cuda")
        kwargs["device"] = torch.device("cpu") if known else device
        if func is torch.Tensor.to and len(args) > 1:  # the device goes back to where it came from
            args = (args[0], kwargs.pop("device"), *args[2:])
        return args, device if known else None

    def _moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self._marks.has(tensor) == (device.type == "cuda"):
            return tensor
        if device.type == "cuda":
            return self._marks.add(tensor.clone())
        self._operations.copies_to_host = True
        try:
            return tensor.clone()
        finally:
            self._operations.copies_to_host = False


_QUESTIONS: dict[Any, Callable[[bool, Callable[[], Any]], Any]] = {
    torch.Tensor.device.__get__: lambda marked, real: DEVICE if marked else real(),
    torch.Tensor.is_cuda.__get__: lambda marked, real: marked or real(),
    torch.Tensor.is_cpu.__get__: lambda marked, real: not marked and real(),
    torch.Tensor.get_device: lambda marked, real: 0 if marked else real(),
}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextmanager
def pretend_gpu() -> Iterator[None]:
    marks = _Marks()
    operations = _Operations(marks)
    with operations, _Calls(marks, operations):
        yield
