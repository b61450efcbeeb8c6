"""Lets megatron-core run where there is no CUDA, in one explicit call: `install_cpu_shim()`.

Why this is honest: megatron-core asks for "the current CUDA device" in places where it only means "where my tensors
live". The shim answers "cpu" to those questions and to nothing else. It moves tensors; it never changes what is
computed: every kernel, schedule, reduction and optimizer step is megatron-core's own. It answers only callers inside
`megatron.*`, so code of ours that asks for a GPU by mistake still fails as it would without the shim. It refuses to
install where CUDA exists, so a GPU run can never be slowed down or altered by it.

    what megatron-core asks                                  | answer
    ---------------------------------------------------------+--------------------------------------------------
    torch.cuda.current_device()                              | torch.device("cpu")
    torch.zeros / empty / tensor / ... (device="cuda")       | the same call on the CPU
    Tensor.cuda(), Module.cuda()                             | the object itself
    Tensor.type() of a CPU tensor                            | the CUDA name of the same type (asserts compare names)
    CUDA RNG state, manual_seed                              | the CPU generator
    synchronize, empty_cache                                 | nothing to do

It leans on internals of the pinned megatron-core version (see constraints.txt).
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

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
    """Install the shim and import megatron-core. Idempotent.

    Raises:
        RuntimeError: CUDA is available; megatron-core needs no shim there.
    """
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim must not be installed where CUDA is available")
    if getattr(torch.cuda, _MARK, False):
        return
    setattr(torch.cuda, _MARK, True)
    _redirect_placement()
    _redirect_random_state()
    with _compile_as_identity(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _MEGATRON_MODULES:
            importlib.import_module(name)
    # megatron-core keeps its own setter of the CUDA generator, which works on CUDA internals.
    mcore_random = importlib.import_module("megatron.core.tensor_parallel.random")
    mcore_random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def cpu_shim_installed() -> bool:
    return bool(getattr(torch.cuda, _MARK, False))


def _asked_by_megatron(depth: int = 2) -> bool:
    """Whether the function `depth` frames up belongs to megatron-core."""
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("megatron.")


def _redirect_placement() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    for name in _CREATION_FUNCTIONS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = _stay(owner.cuda)  # type: ignore[attr-defined]
    torch.Tensor.type = _cuda_type_name(torch.Tensor.type)  # type: ignore[method-assign, assignment]


def _on_cpu(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda") and _asked_by_megatron():
            kwargs["device"] = "cpu"
        return create(*args, **kwargs)

    return wrapper


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

    return wrapper


def _redirect_random_state() -> None:
    def get_state(device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        torch.set_rng_state(new_state)

    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = get_state  # type: ignore[attr-defined]
        module.set_rng_state = set_state  # type: ignore[attr-defined]
        module.manual_seed = torch.manual_seed  # type: ignore[attr-defined, assignment]


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
