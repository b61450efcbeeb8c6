"""Files that several ranks write become one set; a rank that could not write is named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from miles.backends.megatron_utils.checkpoint_files import (
    MODEL,
    OPTIMIZER,
    assemble,
    optimizer_files,
    take_manifests,
    write_part,
    write_tensors,
)
from miles.backends.megatron_utils.safetensors_io import SafetensorsReader
from miles.utils import checkpoint_set

if TYPE_CHECKING:
    from pathlib import Path


def tensors(rank: int) -> list[tuple[str, str, torch.Tensor]]:
    model = [(MODEL, f"weight.{rank}.{i}", torch.full((2,), 10.0 * rank + i)) for i in range(2)]
    return [*model, (OPTIMIZER, f"weight.{rank}.0|exp_avg", torch.ones(2))]


def test_the_parts_of_all_ranks_become_numbered_files_with_an_index(tmp_path: Path) -> None:
    part = tmp_path / "iter_0000003"
    part.mkdir()
    for rank in (5, 0):
        write_part(part, rank, tensors(rank))
    known = assemble(part, take_manifests(part, [0, 5], timeout_secs=5))
    assert sorted(path.name for path in part.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "optimizer-00001-of-00002.safetensors",
        "optimizer-00002-of-00002.safetensors",
    ]
    with SafetensorsReader(part) as reader:
        assert {name: reader[name][0].item() for name in reader.names} == {
            "weight.0.0": 0.0,
            "weight.0.1": 1.0,
            "weight.5.0": 50.0,
            "weight.5.1": 51.0,
        }
    with SafetensorsReader(part, optimizer_files(part)) as reader:
        assert reader.names == {"weight.0.0|exp_avg", "weight.5.0|exp_avg"}
        assert reader.get("weight.0.1|exp_avg") is None
    checkpoint_set.write_record(part, {"rollout_id": 3}, known)
    assert checkpoint_set.verify(part) is None
    (part / "optimizer-00002-of-00002.safetensors").write_bytes(b"damaged")
    assert "optimizer-00002" in str(checkpoint_set.verify(part))


def test_one_file_has_an_index_too_so_that_engines_leave_the_optimizer_alone(tmp_path: Path) -> None:
    write_part(tmp_path, 0, tensors(0))
    assemble(tmp_path, take_manifests(tmp_path, [0], timeout_secs=5))
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"model.safetensors", "optimizer.safetensors"}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    names = {"weight.0.0", "weight.0.1"}
    assert index == {"metadata": {"total_size": 16}, "weight_map": dict.fromkeys(names, "model.safetensors")}


def test_a_rank_writes_several_files_where_one_would_be_too_large(tmp_path: Path) -> None:
    named = ((f"t{i}", torch.ones(4)) for i in range(5))
    files = list(write_tensors(tmp_path, MODEL, 0, named, max_file_bytes=32))
    assert [file.names for file in files] == [("t0", "t1"), ("t2", "t3"), ("t4",)]
    assert [file.tensor_bytes for file in files] == [32, 32, 16]


def test_a_rank_that_cannot_write_is_named(tmp_path: Path) -> None:
    def failing() -> object:
        yield MODEL, "weight", torch.ones(2)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_part(tmp_path, 1, failing())  # type: ignore[arg-type]
    write_part(tmp_path, 0, tensors(0))
    with pytest.raises(OSError, match=r"trainer rank 1 could not write its part: No space left on device"):
        take_manifests(tmp_path, [0, 1], timeout_secs=5)


def test_a_rank_that_never_writes_is_not_waited_for_forever(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="trainer rank 2 has not written its part within 0 s"):
        take_manifests(tmp_path, [2], timeout_secs=0.1)


def test_the_record_of_an_unfinished_rank_is_not_taken(tmp_path: Path) -> None:
    write_part(tmp_path, 0, tensors(0))
    (record,) = tmp_path.glob(".written-*")
    assert json.loads(record.read_text(encoding="utf-8"))["error"] is None
    take_manifests(tmp_path, [0], timeout_secs=5)
    assert not list(tmp_path.glob(".written-*")), "nothing of it stays in the set"
