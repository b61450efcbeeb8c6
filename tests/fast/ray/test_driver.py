"""The last message of a run that ended early says how to go on."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

import pytest

from miles.ray.driver import EXIT_FAILED, run_driver
from miles.ray.run import RunFailed, StopRequested
from miles.ray.stop_signal import EXIT_STOPPED
from tests.fast.utils.checkpoint_sets import make_set

if TYPE_CHECKING:
    from pathlib import Path

ENDS = pytest.mark.parametrize(
    ("end", "exit_code"),
    [(StopRequested(), EXIT_STOPPED), (RunFailed("trainer died"), EXIT_FAILED), (OSError("full"), EXIT_FAILED)],
    ids=["ctrl-c", "dead-process", "error"],
)


@pytest.fixture(autouse=True)
def logging_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles.ray.driver.configure_logging", lambda **options: None)


def last_message(args: Namespace, end: BaseException, exit_code: int, capsys: pytest.CaptureFixture[str]) -> str:
    async def train(args: Namespace) -> None:
        raise end

    assert run_driver(train, args) == exit_code
    return capsys.readouterr().err


@ENDS
def test_a_run_that_ends_early_names_the_newest_checkpoint_and_how_to_resume(
    end: BaseException, exit_code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "sets"
    for i in (1, 2):
        make_set(save, i)
    (save / "iter_0000003").mkdir()  # not a set
    message = last_message(Namespace(run_dir=str(tmp_path / "run"), save=str(save)), end, exit_code, capsys)
    assert f"the newest checkpoint is {save / 'iter_0000002'}: to go on from it, " in message
    assert f"run the same command with --load {save}\n" in message


@ENDS
def test_a_run_that_ends_before_its_first_checkpoint_says_so(
    end: BaseException, exit_code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(tmp_path / "run")
    message = last_message(Namespace(run_dir=run_dir, save=str(tmp_path / "sets")), end, exit_code, capsys)
    assert "sets has no checkpoint yet: the same command starts over" in message
    assert "checkpoint" not in last_message(Namespace(run_dir=run_dir, save=None), end, exit_code, capsys)
