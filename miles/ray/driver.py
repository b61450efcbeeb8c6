"""What both drivers share: logging, the event loop, and the end of a run as one message and an exit code."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from miles.ray.run import RunFailed, StopRequested
from miles.ray.stop_signal import EXIT_STOPPED
from miles.ray.supervisor import original_error
from miles.utils.checkpoint_set import newest_complete
from miles.utils.console import print_error, print_summary
from miles.utils.logging_utils import configure_logging, log_hint
from miles.utils.run_report import format_summary, report_of_stopped_run, write_report

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

EXIT_FAILED = 1


def run_driver(train: Callable[[Namespace], Awaitable[None]], args: Namespace) -> int:
    """Run `train(args)` to its end and return the exit code; tells the user how it ended, in one message."""
    log = Path(args.run_dir) / "logs" / "driver.log"
    configure_logging(file=log, console_level=logging.WARNING)
    try:
        asyncio.run(_as_coroutine(train(args)))
    except StopRequested:
        print_error(f"stopped; the run is in {args.run_dir}{_afterword(args)}")
        return EXIT_STOPPED
    except RunFailed as error:
        logger.info("the run failed", exc_info=error)
        print_error(f"{error}{_afterword(args)}")
        return EXIT_FAILED
    except Exception as error:  # the top of the program: every other failure becomes a message and an exit code here
        cause = original_error(error)
        logger.info("the run failed", exc_info=error)
        print_error(f"{describe(cause)}{log_hint(log, 'the traceback is in')}{_afterword(args)}")
        return EXIT_FAILED
    try:
        print_summary(format_summary(write_report(args.run_dir)))
    except ValueError as error:  # no step was logged
        logger.info("no report: %s", error)
        print_summary("there was nothing to train on (the end of the data, or --num-rollout and what --load has done)")
    return 0


def describe(error: BaseException | None) -> str:
    """The error as one message: its type, what it says, the notes that say where in the user's code it came from."""
    notes = "".join(f"\n    {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}"


async def _as_coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable


def _afterword(args: Namespace) -> str:
    """What the run leaves, and how it goes on."""
    return report_of_stopped_run(args.run_dir) + _how_to_resume(args)


def _how_to_resume(args: Namespace) -> str:
    if not args.save:
        return ""
    newest = newest_complete(args.save)
    if newest is None:
        return f"\n    --save {args.save} has no checkpoint yet: the same command starts over"
    return f"\n    the newest checkpoint is {newest}: to go on from it, run the same command with --load {args.save}"
