"""Two runs never write into one directory, and a killed run keeps nobody out."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from miles.utils.save_lock import SaveLock, check_nobody_writes

if TYPE_CHECKING:
    from pathlib import Path


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    check_nobody_writes("--save", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    first = SaveLock("--save", tmp_path / "new", "runs/first")
    for start in (
        lambda: SaveLock("--save", tmp_path / "new", "runs/second"),
        lambda: check_nobody_writes("--save", tmp_path / "new"),
    ):
        with pytest.raises(ValueError, match=r"--save .*new: another run writes there \(runs/first\)"):
            start()
    first.release()
    first.release()
    check_nobody_writes("--save", tmp_path / "new")
    SaveLock("--save", tmp_path / "new", "runs/third").release()


def test_a_killed_run_gives_the_directory_free(tmp_path: Path) -> None:
    lock = f"SaveLock('--save', {str(tmp_path)!r}, 'x')"
    code = f"from miles.utils.save_lock import SaveLock; import time; k = {lock}; print(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, bufsize=0) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with pytest.raises(ValueError, match="another run writes there"):
            check_nobody_writes("--save", tmp_path)
        owner.send_signal(signal.SIGKILL)
    check_nobody_writes("--save", tmp_path)
