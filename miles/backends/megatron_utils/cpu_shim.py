"""Lets megatron-core run where there is no CUDA, in one explicit call: `install_cpu_shim()`.

Why this is honest: megatron-core asks for "the current CUDA device" in places where it only means "where my tensors
live". The shim answers "cpu" to those questions and to nothing else. It moves tensors; it never changes what is
computed: every kernel, schedule, reduction and optimizer step is megatron-core's own. It refuses to install where CUDA
exists, so a GPU run can never be slowed down or altered by it.

    what megatron-core asks                                  | answer
    ---------------------------------------------------------+--------------------------------------------------
    torch.cuda.current_device()                              | torch.device("cpu")
    torch.zeros / empty / tensor / ... (device="cuda")       | the same call on the CPU
    torch.cuda RNG state, manual_seed                        | the CPU generator
    torch.cuda.synchronize(), streams and events             | nothing to do: a CPU works in order
    Tensor.cuda(), Module.cuda()                             | the object itself
    Tensor.type() of a CPU tensor                            | the CUDA name of the same type (asserts compare names)
    numbers of tokens for experts, copied from the GPU       | the same numbers, which are on the CPU already
    gathering and scattering parts of different sizes        | the same part by part: gloo wants equal ones

How: the modules of megatron-core get a `torch` of their own, a copy of the real module with these few functions
replaced. The real `torch` keeps all its functions: code of ours that asks for a GPU by mistake fails as it would
without the shim, and PyTorch's own machinery (`with torch.device(...)`, say) finds what it expects. Only the three
methods in the two rows before the last cannot be handed out that way; they look at their caller and change nothing for
anyone else.

It leans on internals of the pinned megatron-core version (see constraints.txt).
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
import warnings
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CREATION_FUNCTIONS = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn")
_MEGATRON_MODULES = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)
"""What the trainer uses; imported here so that it is imported once, without its notes on missing GPU packages."""
_MARK = "_miles_cpu_shim"


def install_cpu_shim() -> None:
    """Import megatron-core and install the shim in all of its modules that are imported by now. Idempotent.

    Raises:
        RuntimeError: CUDA is available; megatron-core needs no shim there.
    """
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim must not be installed where CUDA is available")
    with _compile_as_identity(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _MEGATRON_MODULES:
            importlib.import_module(name)
    if not cpu_shim_installed():
        for owner in (torch.Tensor, torch.nn.Module):
            owner.cuda = _stay(owner.cuda)  # type: ignore[attr-defined, method-assign]
        torch.Tensor.type = _cuda_type_name(torch.Tensor.type)  # type: ignore[method-assign, assignment]
        # megatron-core keeps its own setter of the CUDA generator, which works on CUDA internals.
        mcore_random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
        mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
        dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
        dispatcher.maybe_move_tensor_to_cpu = _on_host
    _hand_out(_torch_on_cpu())


def cpu_shim_installed() -> bool:
    return hasattr(torch.Tensor.type, _MARK)


def _hand_out(replacement: types.ModuleType) -> None:
    """Let every module of megatron-core see `replacement` under the name `torch`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, "torch", None) is torch:
            module.torch = replacement  # type: ignore[attr-defined]


def _torch_on_cpu() -> types.ModuleType:
    """A copy of the module `torch` whose CUDA is the CPU."""
    cuda = _copy_of(torch.cuda)
    random = _copy_of(torch.cuda.random)
    for module in (cuda, random):
        module.get_rng_state = lambda device="cuda": torch.get_rng_state()
        module.set_rng_state = lambda new_state, device="cuda": torch.set_rng_state(new_state)
        module.manual_seed = torch.manual_seed
    cuda.random = random
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda device=None: None
    stream = _Stream()
    cuda.Stream = lambda *args, **kwargs: stream
    cuda.current_stream = lambda device=None: stream
    cuda.stream = lambda stream: nullcontext()
    replacement = _copy_of(torch)
    replacement.cuda = cuda
    replacement.distributed = _copy_of(torch.distributed)
    replacement.distributed.all_gather = _gather_parts
    replacement.distributed.reduce_scatter = _reduce_parts
    for name in _CREATION_FUNCTIONS:
        setattr(replacement, name, _on_cpu(getattr(torch, name)))
    return replacement


def _gather_parts(parts: list[torch.Tensor], own: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """`all_gather` into `parts`, whose sizes may differ. All ranks know all sizes."""
    if _equal_sizes(parts) or async_op:
        return dist.all_gather(parts, own, group=group, async_op=async_op)
    parts[dist.get_rank(group)].copy_(own)
    for rank, part in enumerate(parts):
        if part.numel():
            dist.broadcast(part, group_src=rank, group=group)
    return None


def _reduce_parts(
    own: torch.Tensor, parts: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """`reduce_scatter` of `parts`, whose sizes may differ, but not from rank to rank."""
    if _equal_sizes(parts) or async_op:
        return dist.reduce_scatter(own, parts, op=op, group=group, async_op=async_op)
    for rank, part in enumerate(parts):
        reduced = part.contiguous().clone()
        if part.numel():
            dist.reduce(reduced, group_dst=rank, op=op, group=group)
        if rank == dist.get_rank(group):
            own.copy_(reduced)
    return None


def _equal_sizes(parts: list[torch.Tensor]) -> bool:
    return all(part.shape == parts[0].shape for part in parts)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class _Stream:
    """The one order in which a CPU works; it is its own event."""

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def wait(self, stream: _Stream | None = None) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


def _copy_of(module: types.ModuleType) -> Any:
    """The same names bound to the same objects; names that appear later are looked up in the original."""
    copy = types.ModuleType(module.__name__, module.__doc__)
    copy.__dict__.update(vars(module))
    copy.__dict__["__getattr__"] = lambda name: getattr(module, name)
    return copy


def _on_cpu(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return create(*args, **kwargs)

    return wrapper


def _asked_by_megatron() -> bool:
    """Whether the caller of the method that asks is a function of megatron-core."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.")


def _stay(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if _asked_by_megatron() else move(self, *args, **kwargs)

    return wrapper


def _cuda_type_name(type_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_of)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        if not args and not kwargs and isinstance(result, str) and _asked_by_megatron():
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    setattr(wrapper, _MARK, True)
    return wrapper


@contextmanager
def _compile_as_identity() -> Iterator[None]:
    """While megatron-core is imported, `@torch.compile` leaves functions as they are.

    Importing the compiler costs 1.5 s, it needs a C++ compiler at run time, and the local layer spec uses none of the
    functions so decorated.
    """
    original = torch.compile

    def identity(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        return function if function is not None else (lambda f: f)

    torch.compile = identity  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original
