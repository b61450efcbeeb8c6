"""Death within a bucket of a weight update, in the scheduler of an SGLang that is unmodified otherwise.

    the test:        environment() of the run .......... every process that SGLang starts waits for the module at hand
                     order(directory, server, buckets) -- a file --> the scheduler looks for it at each bucket
    the scheduler:   is killed when it is about to receive that bucket, while the trainer sends it and the call is open
                     <-- has_died(directory, server) --

Needs the standard library alone: Python imports it before anything else.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_DIRECTORY = "MILES_TEST_SGLANG_FAULTS"
_MODULE = "sglang.srt.model_executor.model_runner_components.weight_updater"
_SITE = Path(__file__).parent / "engine_site"


def environment(directory: Path) -> dict[str, str]:
    """What a run needs in its environment so that its engines take orders from `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(_SITE), str(Path(__file__).parents[2])])
    return {"PYTHONPATH": path, _DIRECTORY: str(directory)}


def order(directory: Path, server: int, buckets: int) -> None:
    """The scheduler of the server with this pid dies in the `buckets`-th bucket that it is sent from now on."""
    part = directory / f".{server}"
    part.write_text(str(buckets), encoding="utf-8")
    part.rename(directory / f"{server}.order")


def has_died(directory: Path, server: int) -> bool:
    return (directory / f"{server}.died").exists()


def install() -> None:
    """Called in a process that SGLang has started, before it imports anything."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Lets the module be found and executed as it is, and changes one method afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            _change(module.WeightUpdater)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _change(updater: Any) -> None:
    receive, left = updater.receive_weights_from_distributed, []
    directory, server = Path(os.environ[_DIRECTORY]), os.getppid()

    def receive_or_die(self: Any, **keywords: Any) -> Any:
        path = directory / f"{server}.order"
        if path.exists():
            left[:] = [(left[0] if left else int(path.read_text(encoding="utf-8"))) - 1]
            if left[0] <= 0:
                (directory / f"{server}.died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return receive(self, **keywords)

    updater.receive_weights_from_distributed = receive_or_die
