"""Small things that several packages need: plug-ins by dotted path, and periodic actions."""

from __future__ import annotations

import difflib
import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator


class FunctionRegistry:
    """Functions under names of their own, looked up before dotted paths; for tests and notebooks."""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}

    @contextmanager
    def temporary(self, name: str, fn: Any) -> Iterator[None]:
        """Make `fn` loadable as `name` within the block."""
        if name in self._functions:
            raise ValueError(f"function registry: {name!r} is registered already")
        self._functions[name] = fn
        try:
            yield
        finally:
            del self._functions[name]

    def get(self, name: str) -> Any | None:
        return self._functions.get(name)


function_registry = FunctionRegistry()


def load_function(path: str | None) -> Any:
    """The object that `path` names: `package.module.attribute` (or a registered name); None for None and the empty
    string.

    Raises ValueError naming the path and what the module has instead, where it does not exist. An ImportError inside
    the user's module comes through as it is.
    """
    if not path:
        return None
    registered = function_registry.get(path)
    if registered is not None:
        return registered
    module_path, _, attribute = path.rpartition(".")
    if not module_path:
        raise ValueError(f"{path!r} is not a dotted path to a function (package.module.function)")
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name and (module_path == error.name or module_path.startswith(error.name + ".")):
            raise ValueError(
                f"{path!r}: there is no module {error.name!r}; it must be importable from the current directory or "
                "PYTHONPATH"
            ) from error
        raise
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        close = difflib.get_close_matches(attribute, public) or sorted(public)[:10]
        raise ValueError(
            f"{path!r}: module {module_path!r} has no {attribute!r}; it has {', '.join(close) or 'nothing'}"
        )
    return getattr(module, attribute)


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """Whether an action that is due every `interval` rollouts is due after `rollout_id` (counted from 0).

    Never for interval None. Always after the last rollout where `num_rollout` is given, and at the end of each epoch
    where `num_rollout_per_epoch` is.
    """
    if interval is None:
        return False
    if num_rollout is not None and rollout_id == num_rollout - 1:
        return True
    done = rollout_id + 1
    return done % interval == 0 or (num_rollout_per_epoch is not None and done % num_rollout_per_epoch == 0)


async def call_agent_abort_hook(args: Namespace) -> None:
    """Await the coroutine `abort(args)` beside the user's agent function, where there is one."""
    path = getattr(args, "custom_agent_function_path", None)
    if not path:
        return
    hook: Callable[[Namespace], Any] | None = getattr(importlib.import_module(path.rpartition(".")[0]), "abort", None)
    if hook is not None:
        await hook(args)


class SingletonMeta(type):
    """A metaclass whose classes have one instance per process."""

    _instances: dict[type, Any] = {}  # noqa: RUF012 - the one place that holds the instances

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    @staticmethod
    def clear(cls: type) -> None:
        """Forget the instance of `cls`; the next call makes a new one."""
        SingletonMeta._instances.pop(cls, None)
