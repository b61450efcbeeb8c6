"""What a run would fail on later is told before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles.ray import preflight


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
