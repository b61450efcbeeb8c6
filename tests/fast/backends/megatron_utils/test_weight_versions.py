"""Versions on disk: what did not change is linked, and a crash leaves what was there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from miles.backends.megatron_utils.safetensors_io import SafetensorsReader
from miles.backends.megatron_utils.weight_files import check_weights
from miles.backends.megatron_utils.weight_versions import WeightVersions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miles.backends.megatron_utils.wire import Piece

ROOT = Path(__file__).parents[4]
NAMES = [f"t{i}" for i in range(6)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "x", "dtype": "float64"}', encoding="utf-8")
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    return directory


@pytest.fixture
def versions(tmp_path: Path, source: Path) -> WeightVersions:
    """Two tensors of 40 bytes a file."""
    return WeightVersions(tmp_path / "versions", source=source, file_bytes=80)


def weights(*changed: str) -> Iterator[Piece]:
    for name in NAMES:
        yield [(name, torch.full((10,), 2.0 if name in changed else 1.0))]


def inodes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in directory.glob("weights-*")}


def modes(directory: Path) -> set[str]:
    return {oct(path.stat().st_mode & 0o777) for path in directory.iterdir()}


def test_files_that_did_not_change_are_linked(versions: WeightVersions) -> None:
    first = versions.write(weights(), 1)
    assert versions.bytes_written == 240
    second = versions.write(weights("t2"), 2)
    assert versions.bytes_written == 80
    before, after = inodes(first), inodes(second)
    assert before.keys() == after.keys() == {f"weights-0000{i}.safetensors" for i in range(3)}
    assert [name for name in before if before[name] != after[name]] == ["weights-00001.safetensors"]
    with SafetensorsReader(second) as reader:
        assert {name: reader[name][0].item() for name in NAMES} == dict.fromkeys(NAMES, 1.0) | {"t2": 2.0}
    with SafetensorsReader(first) as reader:
        assert reader["t2"][0] == 1.0, "a version is never written to again"


def test_files_that_other_engines_could_not_read_are_written_anew(versions: WeightVersions) -> None:
    before = os.umask(0o022)
    try:
        first = versions.write(weights(), 1)
        for file in first.glob("weights-*"):
            file.chmod(0o600)
        second = versions.write(weights(), 2)
        assert versions.bytes_written == 240
        versions.write(weights(), 3)
        assert versions.bytes_written == 0, "from then on they are linked again"
    finally:
        os.umask(before)
    assert modes(first) == {"0o600", "0o644"} and modes(second) == {"0o644"}


def test_a_version_is_a_checkpoint_of_its_own(versions: WeightVersions) -> None:
    directory = versions.write(weights(), 1, dtype=torch.bfloat16)
    check_weights(directory)
    assert json.loads((directory / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"
    assert (directory / "tokenizer.json").is_file()
    with SafetensorsReader(directory) as reader:
        assert reader.names == set(NAMES) and reader["t0"].dtype == torch.bfloat16


def test_the_same_version_can_be_written_again(versions: WeightVersions) -> None:
    versions.write(weights(), 1)
    versions.write(weights("t0"), 1)
    assert versions.bytes_written == 80
    with SafetensorsReader(versions.path(1)) as reader:
        assert reader["t0"][0] == 2.0 and reader["t1"][0] == 1.0


def test_the_current_version_and_the_one_before_it_are_kept(versions: WeightVersions, tmp_path: Path) -> None:
    for version in (1, 2, 3, 9):
        versions.write(weights(), version)
    (tmp_path / "versions" / "other").mkdir()
    versions.prune(3)
    assert sorted(p.name for p in (tmp_path / "versions").iterdir()) == [
        "other",
        "version-00000002",
        "version-00000003",
    ]


def test_without_hard_links_everything_is_written(versions: WeightVersions, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    versions.write(weights(), 1)
    versions.write(weights(), 2)
    assert versions.bytes_written == 240
    check_weights(versions.path(2))


def test_digests_that_cannot_be_read_count_for_nothing(versions: WeightVersions) -> None:
    (versions.write(weights(), 1) / "digests.json").write_text("[", encoding="utf-8")
    versions.write(weights(), 2)
    assert versions.bytes_written == 240


def test_an_error_in_the_middle_leaves_the_former_version(versions: WeightVersions, tmp_path: Path) -> None:
    versions.write(weights(), 1)

    def broken() -> Iterator[Piece]:
        yield from list(weights("t0"))[:4]
        raise OSError("a rank is gone")

    with pytest.raises(OSError, match="a rank is gone"):
        versions.write(broken(), 2)
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["version-00000001"]
    check_weights(versions.path(1))


KILLED_MIDWAY = """
import os, signal, sys, torch
from miles.backends.megatron_utils.weight_versions import WeightVersions

def pieces():
    for i in range(6):
        if i == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        yield [(f"t{i}", torch.full((10,), 3.0))]

WeightVersions(sys.argv[1], source=sys.argv[2], file_bytes=80).write(pieces(), 2)
"""


def test_a_kill_in_the_middle_leaves_the_former_version_and_nothing_that_lasts(
    versions: WeightVersions, source: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "versions"
    versions.write(weights(), 1)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_MIDWAY, str(directory), str(source)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=55,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(list(directory.glob(".part-version-00000002-*/weights-*"))) > 0, "it was in the middle"
    check_weights(versions.path(1))
    with SafetensorsReader(versions.path(1)) as reader:
        assert reader["t0"][0] == 1.0
    check_weights(versions.write(weights("t1"), 2))
    assert sorted(path.name for path in directory.iterdir()) == ["version-00000001", "version-00000002"]
