from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from miles.ray.temporary import LOCK, OwnedDirectory, remove_abandoned

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = "miles-test-"
OWNER = f"""
import sys
from miles.ray.temporary import OwnedDirectory
directory = OwnedDirectory({PREFIX!r})
(directory.path / "session").mkdir()
(directory.path / "session" / "socket").touch()
(directory.path / "session_latest").symlink_to("session")
print(directory.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_the_directory_of_a_killed_owner_goes_and_that_of_a_living_one_stays(root: Path) -> None:
    owners = []
    for _ in range(2):
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert owner.stdout is not None
        owners.append((owner, os.path.basename(owner.stdout.readline().strip())))
    (killed, its_name), (living, name) = owners
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert names(root) == {its_name, name}

    mine = OwnedDirectory(PREFIX)
    assert names(root) == {name, mine.path.name}
    assert (root / name / "session" / "socket").exists()
    living.communicate()
    remove_abandoned(PREFIX)
    assert names(root) == {mine.path.name}
    mine.remove()
    mine.remove()
    assert names(root) == set()


def test_what_has_no_lock_file_or_another_name_is_left_alone(root: Path) -> None:
    (root / f"{PREFIX}older").mkdir()
    (root / "other").mkdir()
    (root / "other" / LOCK).touch()
    (root / f"{PREFIX}file").touch()
    remove_abandoned(PREFIX)
    assert names(root) == {f"{PREFIX}older", "other", f"{PREFIX}file"}


def test_a_lock_that_cannot_be_opened_is_left_alone(root: Path) -> None:
    directory = root / f"{PREFIX}foreign"
    directory.mkdir()
    (directory / LOCK).symlink_to(root / "elsewhere")
    (root / "elsewhere").touch()
    remove_abandoned(PREFIX)
    assert directory.exists()
