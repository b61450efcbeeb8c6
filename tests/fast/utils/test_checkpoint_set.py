"""Which set a run resumes from, and what makes one unusable."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from miles.utils import checkpoint_set
from tests.fast.utils.checkpoint_sets import make_set

if TYPE_CHECKING:
    from pathlib import Path


def names(paths: list[Path]) -> list[int]:
    return [checkpoint_set.rollout_id_of(path) for path in paths]


def test_the_newest_set_is_taken_and_is_whole(tmp_path: Path) -> None:
    sets = [make_set(tmp_path, i) for i in (3, 7)]
    assert checkpoint_set.newest_readable(tmp_path) == sets[1]
    assert checkpoint_set.verify(sets[0]) is None
    assert not list(tmp_path.glob(".*")), "nothing staged is left"


def test_without_a_set_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    assert checkpoint_set.newest_readable(tmp_path / "absent") is None
    (tmp_path / ".part-iter_0000001-77").mkdir()
    (tmp_path / ".rollout-0000001-77.json").write_text("{}", encoding="utf-8")
    assert checkpoint_set.newest_readable(tmp_path) is None


def test_sets_before_the_pointer_come_before_sets_after_it(tmp_path: Path) -> None:
    for i in (1, 2, 3, 4):
        make_set(tmp_path, i)
    assert names(checkpoint_set.candidates(tmp_path)) == [4, 3, 2, 1]
    checkpoint_set.write_pointer(tmp_path, 2)
    assert names(checkpoint_set.candidates(tmp_path)) == [2, 1, 4, 3]
    (tmp_path / checkpoint_set.POINTER).unlink()
    assert names(checkpoint_set.candidates(tmp_path)) == [4, 3, 2, 1]


def test_a_number_that_changed_in_the_record_refuses_the_set(tmp_path: Path) -> None:
    damaged = make_set(tmp_path, 2, weight_version=4)
    record = damaged / "state.json"
    record.write_text(record.read_text(encoding="utf-8").replace('"weight_version": 4', '"weight_version": 5'))
    assert checkpoint_set.verify(damaged) == "state.json is damaged (its digest differs)"


@pytest.mark.parametrize("pointer", [b"\xff\xfe", b"", "\N{SUPERSCRIPT TWO}".encode()])
def test_a_damaged_pointer_counts_as_none(pointer: bytes, tmp_path: Path) -> None:
    newest = [make_set(tmp_path, i) for i in (1, 2)][-1]
    (tmp_path / checkpoint_set.POINTER).write_bytes(pointer)
    assert checkpoint_set.newest_readable(tmp_path) == newest


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("rollout/state.json", None, "rollout/state.json is missing"),
        ("rollout/state.json", b"[]", "rollout/state.json is damaged"),
        ("rollout/state.json", b"{", "rollout/state.json has 1 bytes instead of 2"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("state.json", b"{", "state.json cannot be read"),
        ("state.json", b'{"format": 4, "files": {}}', "format 4"),
        ("state.json", b'{"format": 3, "files": {}, "rollout_id": 2}', "state.json is damaged"),
        ("state.json", b'{"format": 3, "files": []}', "state.json cannot be read"),
        ("state.json", b'{"format": 3, "files": {"model.safetensors": null}}', "state.json cannot be read"),
        ("state.json", b'{"format": 3, "files": {"model.safetensors": {}}}', "state.json cannot be read"),
        ("state.json", b'{"format": 2, "files": {}, "rollout_id": 1}', "is of rollout 1"),
    ],
)
def test_a_damaged_part_refuses_the_whole_set(
    file: str, damage: bytes | None, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    previous, newest = make_set(tmp_path, 1), make_set(tmp_path, 2)
    if damage is None:
        (newest / file).unlink()
    else:
        (newest / file).write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert checkpoint_set.newest_readable(tmp_path) == previous
    assert "iter_0000002 is refused" in caplog.text and reason in caplog.text
    (previous / "state.json").unlink()
    with pytest.raises(ValueError, match=r"--load .*no checkpoint there is readable.*iter_0000002.*iter_0000001"):
        checkpoint_set.newest_readable(tmp_path)


def test_a_new_save_removes_what_killed_ones_have_left(tmp_path: Path) -> None:
    (tmp_path / ".part-iter_0000001-77").mkdir()
    (tmp_path / ".rollout-0000001-77.json").write_text("{}", encoding="utf-8")
    make_set(tmp_path, 2)
    checkpoint_set.remove_abandoned_parts(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000002", checkpoint_set.POINTER]


def test_other_directories_are_no_sets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a checkpoint set"):
        checkpoint_set.rollout_id_of(tmp_path / "iter_12")
