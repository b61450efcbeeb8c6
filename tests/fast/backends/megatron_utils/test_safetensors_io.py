"""Checkpoints are read from safetensors only."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch

from miles.backends.megatron_utils.safetensors_io import SafetensorsReader, write_file, write_sharded

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = [(f"t{i}", torch.arange(4.0) + i) for i in range(5)]


@pytest.mark.parametrize(("max_bytes", "files"), [(10**9, 1), (32, 3), (1, 5)])
def test_written_tensors_are_read_back(tmp_path: Path, max_bytes: int, files: int) -> None:
    write_sharded(tmp_path, TENSORS, max_shard_bytes=max_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    with SafetensorsReader(tmp_path) as reader:
        assert reader.names == {name for name, _ in TENSORS}
        assert all(torch.equal(reader[name], tensor) for name, tensor in TENSORS)
        with pytest.raises(ValueError, match="no tensor 'other'"):
            reader["other"]


def test_a_checkpoint_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    with pytest.raises(ValueError, match=r"no model\.safetensors.*safetensors only"):
        SafetensorsReader(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ValueError, match="lacks model-00001-of-00002"):
        SafetensorsReader(tmp_path)


def test_a_truncated_file_is_a_clear_error(tmp_path: Path) -> None:
    write_sharded(tmp_path, TENSORS)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_follow_the_umask_so_that_engines_of_other_users_can_read_them(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        write_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
        write_sharded(tmp_path, TENSORS, max_shard_bytes=32)
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()} == {
        file.name: oct(mode) for file in tmp_path.iterdir()
    }


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nowhere/a\.safetensors cannot be written"):
        write_file({"a": torch.zeros(2)}, tmp_path / "nowhere" / "a.safetensors")
