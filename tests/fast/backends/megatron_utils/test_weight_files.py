from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from miles.backends.megatron_utils.weight_files import INDEX_FILE, SINGLE_FILE, check_weights

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A weight file that is as it should be."""
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / SINGLE_FILE)
    return tmp_path / SINGLE_FILE


def refused(directory: Path) -> str:
    with pytest.raises(ValueError) as error:
        check_weights(directory)
    return str(error.value)


def test_whole_weights_pass(whole: Path) -> None:
    check_weights(whole.parent)
    whole.rename(whole.with_name("part.safetensors"))
    (whole.parent / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    check_weights(whole.parent)


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert f"has no {SINGLE_FILE} and no {INDEX_FILE}" in refused(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "x", "b": "y", "c": "x"}}))
    assert f"lacks x, y, which {INDEX_FILE} lists" in refused(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    assert f"{INDEX_FILE} is not an index of weights" in refused(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_file_that_was_cut_off_is_named(whole: Path, kept: int) -> None:
    whole.write_bytes(whole.read_bytes()[:kept])
    message = refused(whole.parent)
    assert str(whole) in message
    assert "cut off" in message


def test_a_pointer_of_git_lfs_is_named_as_what_it_is(whole: Path) -> None:
    whole.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")
    assert "is a pointer of Git LFS" in refused(whole.parent)


@pytest.mark.parametrize("header", [b"nonsense", b"[1]", b'{"a": 3}', b'{"a": {"data_offsets": []}}'])
def test_a_file_of_another_kind_is_named(whole: Path, header: bytes) -> None:
    whole.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "is not a safetensors file: its header cannot be read" in refused(whole.parent)
