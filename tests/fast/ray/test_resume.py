"""Which checkpoint set a run goes on from, and what of it the rollout side takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from miles.ray.resume import check_load, check_save, choose_checkpoint, rollout_part
from tests.fast.utils.checkpoint_sets import make_set

if TYPE_CHECKING:
    from pathlib import Path


async def test_without_a_set_the_run_starts_from_its_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await choose_checkpoint(None) is None
    assert await choose_checkpoint(str(tmp_path)) is None
    assert "starting from its beginning" in capsys.readouterr().out


async def test_a_hugging_face_checkpoint_is_told_to_give_its_weights_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert await choose_checkpoint(str(tmp_path)) is None
    told = capsys.readouterr().out
    assert f"--load {tmp_path} is a Hugging Face checkpoint: starting from its weights" in told
    assert "holds no checkpoint" not in told


async def test_the_newest_set_is_chosen_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("miles.ray.resume.newest_readable", lambda load: tmp_path / "iter_0000007")
    assert await choose_checkpoint(str(tmp_path)) == str(tmp_path / "iter_0000007")
    assert "resuming from" in capsys.readouterr().out


def test_another_start_leaves_the_rollout_part_out(caplog: pytest.LogCaptureFixture) -> None:
    assert rollout_part("set", start=8, resumed_at=8) == "set"
    assert rollout_part(None, start=3, resumed_at=0) is None
    assert not caplog.records
    assert rollout_part("set", start=3, resumed_at=8) is None
    assert "--start-rollout-id 3 is not the loaded checkpoint's 8" in caplog.text


@pytest.mark.parametrize("load", [None, "elsewhere"])
def test_a_run_does_not_replace_checkpoints_that_it_does_not_go_on_from(tmp_path: Path, load: str | None) -> None:
    save = str(tmp_path)
    check_save(save, load)
    for i in (1, 2):
        make_set(tmp_path, i)
    with pytest.raises(ValueError, match="would replace") as error:
        check_save(save, load)
    message = str(error.value)
    assert message.startswith(f"--save {save}: checkpoints are there, the newest is {tmp_path / 'iter_0000002'}")
    assert message.endswith(f"Instead: --load {save} to go on from it, or another directory for --save")
    assert ("loads elsewhere" if load else "has no --load") in message


def test_a_run_that_goes_on_from_the_checkpoints_may_save_beside_them(tmp_path: Path) -> None:
    sets, link = tmp_path / "sets", tmp_path / "link"
    make_set(sets, 1)
    link.symlink_to(sets)
    for load in (sets, link, f"{sets}/", sets / ".." / "sets"):
        check_save(str(sets), str(load))


def test_what_no_run_can_go_on_from_is_not_replaced_either(tmp_path: Path) -> None:
    (tmp_path / "iter_0000010").mkdir()  # another program's
    with pytest.raises(ValueError, match=r"iter_0000010.* Instead: another directory for --save$"):
        check_save(str(tmp_path), None)


def test_one_set_is_not_the_directory_that_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = make_set(tmp_path, 19)
    for load in (tmp_path, tmp_path / "absent", tmp_path / "iter_0000020"):
        check_load(str(load))
    with pytest.raises(ValueError, match=f"--load {newest} is a single") as error:
        check_load(str(newest))
    assert f"Instead: --load {tmp_path}, " in str(error.value)
    assert f"write 19 into {tmp_path}/latest_checkpointed_iteration.txt" in str(error.value)
    monkeypatch.chdir(newest)
    with pytest.raises(ValueError, match=f"--load . is a single .*Instead: --load {tmp_path}, "):
        check_load(".")
