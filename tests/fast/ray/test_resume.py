"""Which checkpoint set a run goes on from, and what of it the rollout side takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.ray.resume import choose_checkpoint, rollout_part

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


async def test_without_a_set_the_run_starts_from_its_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await choose_checkpoint(None) is None
    assert await choose_checkpoint(str(tmp_path)) is None
    assert "starting from its beginning" in capsys.readouterr().out


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
