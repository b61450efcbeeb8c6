"""Which checkpoint set a run goes on from, what of it the rollout side takes, and which sets a run may not replace."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from miles.utils.checkpoint_set import POINTER, candidates, is_complete, newest_readable, rollout_id_of
from miles.utils.console import print_note

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

T = TypeVar("T")


def check_save(save: str, load: str | None) -> None:
    """Raise ValueError where a run would replace the checkpoints under `--save` because it does not go on from them.

    Any `iter_<rollout id>` counts, also one that another program has written or that is not whole.
    """
    found = candidates(save)
    if not found or (load and same_directory(load, save)):
        return
    complete = [checkpoint for checkpoint in found if is_complete(checkpoint)]
    newest, instead = (complete or found)[0], "another directory for --save"
    if complete:
        instead = f"--load {save} to go on from it, or {instead}"
    loads = f"loads {load}" if load else "has no --load"
    raise ValueError(
        f"--save {save}: checkpoints are there, the newest is {newest}, and this run, which {loads}, would replace "
        f"them. Instead: {instead}"
    )


def same_directory(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def check_load(load: str) -> None:
    """Raise ValueError where `--load` names one set instead of the directory that holds it."""
    checkpoint = Path(load).absolute()
    if not is_complete(checkpoint):
        return
    parent = Path(load).parent if Path(load).name == checkpoint.name else checkpoint.parent
    raise ValueError(
        f"--load {load} is a single checkpoint set. Instead: --load {parent}, the directory that holds it, to go on "
        f"from the newest set there (to go on from this one, write {rollout_id_of(checkpoint)} into {parent / POINTER} "
        f"first); or --hf-checkpoint {load} for a new run from its weights"
    )


async def choose_checkpoint(load: str | None) -> str | None:
    """The set in `--load` that trainer and rollout side go on from; None where there is none."""
    if not load:
        return None
    chosen = await _in_daemon_thread(newest_readable, load)
    if chosen is None and (Path(load) / "config.json").is_file():
        print_note(
            f"--load {load} is a Hugging Face checkpoint: starting from its weights, at the beginning of optimizer, "
            "schedule and prompts"
        )
        return None
    if chosen is None:
        print_note(f"--load {load} holds no checkpoint of a run: starting from its beginning")
        return None
    print_note(f"resuming from {chosen}")
    return str(chosen)


def rollout_part(checkpoint: str | None, *, start: int, resumed_at: int) -> str | None:
    """The set whose rollout part a run uses that starts with rollout `start`, where the trainer's part of `checkpoint`
    goes on with `resumed_at`."""
    if checkpoint is None or start == resumed_at:
        return checkpoint
    logger.warning(
        "--start-rollout-id %d is not the loaded checkpoint's %d: its rollout part is left out, and prompts go on from "
        "what the data source itself has kept, or else start from the beginning",
        start,
        resumed_at,
    )
    return None


async def _in_daemon_thread(function: Callable[..., T], *args: Any) -> T:
    """Like `asyncio.to_thread`, but the program's end does not wait for the thread: a stop must not take as long as
    reading a large checkpoint does."""
    loop = asyncio.get_running_loop()
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def call() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:  # whatever it is, it is the outcome
            outcome.set_exception(error)

    threading.Thread(target=call, name=function.__name__, daemon=True).start()
    return await asyncio.wrap_future(outcome, loop=loop)
