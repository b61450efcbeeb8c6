"""Temporary directories that do not outlive the runs they belong to, however these end.

    <tmp>/<prefix>xxxxxxxx/     owner.lock is locked by the owner for as long as its process lives

A killed process cannot remove its directory, but its lock goes with it: the next run that starts finds the directory
unlocked, and removes it. A directory without a lock file is left alone: nobody knows whose it is.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK = "owner.lock"


class OwnedDirectory:
    """A new directory `<tmp>/<prefix>xxxxxxxx`, which this process owns until `remove` or its own end.

    Making one removes those of the same prefix, and of this user, whose owners have ended.
    """

    def __init__(self, prefix: str) -> None:
        remove_abandoned(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # Locked before it has its name, so that nobody sees it unlocked.
        descriptor, unnamed = tempfile.mkstemp(dir=self.path)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(unnamed, self.path / LOCK)
        self._lock = descriptor

    def remove(self) -> None:
        """Twice is fine."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(prefix: str) -> None:
    """Remove the directories of this prefix whose owners have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*/{LOCK}"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # of another user, or just being removed
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_uid == os.getuid():
                logger.info("removing %s, which a run that was killed has left", path.parent)
                _remove(path.parent)
        except BlockingIOError:  # its owner lives
            pass
        finally:
            os.close(descriptor)


def _remove(directory: Path) -> None:
    """The lock file last: as long as anything is left, the next run may try again."""
    for child in directory.iterdir():
        if child.name == LOCK:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink(missing_ok=True)
    (directory / LOCK).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
