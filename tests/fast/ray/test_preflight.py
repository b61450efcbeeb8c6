"""What a run would fail on later is told before anything starts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from miles.ray import preflight
from miles.utils.save_lock import SaveLock
from tests.fast.utils.checkpoint_sets import make_set


def test_missing_packages_are_named_with_the_python_that_lacks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_PACKAGES", ("json", "no_such_package", "no_such_parent.child"))
    with pytest.raises(ValueError, match=r"python.* lacks no_such_package, no_such_parent\.child: activate"):
        preflight.check_packages()


def test_every_package_that_a_run_needs_is_installed_here() -> None:
    preflight.check_packages()


def test_a_directory_that_can_be_made_is_fine_and_none_is_made(tmp_path: Path) -> None:
    preflight.check_writable("--save", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/proc/x", "/dev/null/x"])
def test_a_directory_that_cannot_be_made_is_named_with_its_flag(path: str) -> None:
    with pytest.raises(ValueError, match=f"--save {path}: nothing can be written to /"):
        preflight.check_writable("--save", Path(path))


def test_relative_paths_are_refused_where_the_run_joins_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    args = Namespace(hf_checkpoint="/models/m", ref_load=None, runs_dir="runs", save="out", load=None, save_hf=None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    preflight.check_cluster_paths(args)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ValueError, match="--runs-dir runs is a relative path") as error:
        preflight.check_cluster_paths(args)
    assert str(Path.cwd() / "runs") in str(error.value)
    assert "--save out is a relative path" in str(error.value)
    args.runs_dir, args.save = "/shared/runs", "/shared/out"
    preflight.check_cluster_paths(args)


def test_an_export_that_cannot_be_written_is_told_before_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in ("check_cluster_paths", "check_prompt_data", "check_memory"):
        monkeypatch.setattr(preflight, check, lambda args: None)
    export = "/proc/export/{rollout_id}"
    args = Namespace(runs_dir=str(tmp_path), save=str(tmp_path), load=None, save_hf=export, update_weight_disk_dir=None)
    with pytest.raises(ValueError, match=r"--save-hf /proc/export/0: nothing can be written to /proc"):
        preflight.preflight(args)


def test_a_directory_that_another_run_saves_into_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("check_cluster_paths", "check_prompt_data", "check_memory"):
        monkeypatch.setattr(preflight, check, lambda args: None)
    sets = str(tmp_path / "sets")
    args = Namespace(runs_dir=str(tmp_path), save=sets, load=None, save_hf=None, update_weight_disk_dir=None)
    preflight.preflight(args)
    lock = SaveLock("--save", args.save, "runs/first")
    with pytest.raises(ValueError, match="another run writes there"):
        preflight.preflight(args)
    lock.release()


def test_checkpoints_that_the_run_would_replace_are_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in ("check_cluster_paths", "check_prompt_data", "check_memory"):
        monkeypatch.setattr(preflight, check, lambda args: None)
    sets = tmp_path / "sets"
    newest = make_set(sets, 2)

    def start(**flags: str) -> None:
        none = {"save": None, "load": None, "save_hf": None, "update_weight_disk_dir": None}
        preflight.preflight(Namespace(runs_dir=str(tmp_path), **{**none, **flags}))

    with pytest.raises(ValueError, match=r"--save .*sets: checkpoints are there.*Instead: --load .*sets to go on"):
        start(save=str(sets))
    with pytest.raises(ValueError, match=r"--load .*iter_0000002 is a single checkpoint set"):
        start(load=str(newest))
    start(save=str(sets), load=str(sets))
