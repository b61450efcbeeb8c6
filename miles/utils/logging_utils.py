"""Where a process of the run writes: one log file each, standard output and error included."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(*, file: str | Path | None = None, console_level: int = logging.INFO) -> None:
    """Log to standard error from `console_level` on, and everything from INFO on to `file` where one is given."""
    # A full disk must not become a traceback on the console for each record that cannot be written.
    logging.raiseExceptions = False
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in list(root.handlers):
        root.removeHandler(handler)
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(console_level)
    handlers: list[logging.Handler] = [console]
    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(handler)


def log_hint(path: str | Path, what: str = "see") -> str:
    """`; see PATH` for a message, with `what` before the path; empty where nothing could be written to the log."""
    try:
        written = Path(path).stat().st_size > 0
    except OSError:
        written = False
    return f"; {what} {path}" if written else ""


def redirect_output(path: str | Path) -> None:
    """Append everything that this process writes from now on, native code included, to `path`, and log there."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    configure_logging()
