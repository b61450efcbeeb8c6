"""One run at a time writes into a directory: a second one would take the first one's half-written sets for abandoned,
and remove weights that its engines are to read.

The lock is the operating system's and goes with the driver, however that ends, so that the same command can go on from
the newest set at once.
"""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

LOCK = ".lock"


def written_directories(args: Namespace) -> Iterator[tuple[str, str]]:
    """The flags, with their values, whose directories a run must have for itself."""
    for flag, directory in (("--save", args.save), ("--update-weight-disk-dir", args.update_weight_disk_dir)):
        if directory:
            yield flag, directory


class SaveLock:
    """Held from the start until `release` or the end of this process."""

    def __init__(self, flag: str, directory: str | Path, owner: str) -> None:
        """Raises ValueError where another run writes into `directory`, the value of `flag`; `owner` is what the others
        are told then."""
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.read(self._descriptor, 4096).decode(errors="replace").strip()
            self.release()
            raise ValueError(
                f"{flag} {directory}: another run writes there ({other}). "
                f"Instead: wait for its end, or another directory. Where its machine is lost: remove {root / LOCK}"
            ) from None
        except OSError as error:  # a file system without locks: nobody is told, as nobody can be
            logger.info("%s %s cannot be locked (%s): see to it that no other run writes there", flag, directory, error)
        with suppress(OSError):  # on a full disk the lock holds all the same, without a name
            os.truncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{owner}\n".encode(), 0)

    def release(self) -> None:
        """Twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def check_nobody_writes(flag: str, directory: str | Path) -> None:
    """Raise ValueError where another run writes into `directory` now. Makes nothing."""
    try:
        descriptor = os.open(Path(directory) / LOCK, os.O_RDONLY)
    except OSError:  # no run has ever written there
        return
    os.close(descriptor)
    SaveLock(flag, directory, "a run that is about to start").release()
