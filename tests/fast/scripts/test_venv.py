"""scripts/venv.sh with an interpreter that only pretends to install: once, again after a change, never twice."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

VENV_SH = Path(__file__).resolve().parents[3] / "scripts" / "venv.sh"

# Answers what venv.sh asks of a Python. PIP_FAILS makes the installation fail, PYTHON_OLD the version check.
FAKE_PYTHON = """#!/usr/bin/env bash
root=@root@
case "$1 $2" in
    "-c import sys"*) [ ! -e "$root/python-is-old" ] ;;
    "-c import ensurepip"*) exit 0 ;;
    "-V "*) echo "Python 3.12.0" ;;
    "-VV "*) echo "Python 3.12.0 (fake)" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/bin/pip" ;;
    "-m pip")
        echo "$*" >>"$root/pip-calls"
        [ ! -e "$root/pip-fails" ]
        ;;
    *) echo "unexpected: $*" >&2 && exit 9 ;;
esac
"""


class Checkout:
    """A root with the two files that decide what is installed, and a record of pip's calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.python = root / "fake-python"
        self.python.write_text(FAKE_PYTHON.replace("@root@", str(root)))
        self.python.chmod(0o755)
        (root / "pyproject.toml").write_text("[project]\n")
        (root / "constraints.txt").write_text("a==1\n")

    def make_venv(self, extra: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(extra, **environment)
        output, errors = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def start(self, extra: str = "", **environment: str) -> subprocess.Popen[str]:
        script = f'set -euo pipefail; source {VENV_SH}; make_venv "{self.root}" {extra}; echo "$VENV_PYTHON"'
        return subprocess.Popen(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/bin", "MILES_PYTHON": str(self.python), **environment},
        )

    def installations(self) -> list[str]:
        """What was installed, in order: `.`, `.[test]`, ..."""
        path = self.root / "pip-calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return ["." + line.split("--editable ")[1].removeprefix(str(self.root)) for line in lines]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_it_installs_once_with_the_pins(checkout: Checkout) -> None:
    first = checkout.make_venv()
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{checkout.root}/.venv/bin/python\n"
    assert f"--constraint {checkout.root}/constraints.txt" in (checkout.root / "pip-calls").read_text()
    second = checkout.make_venv()
    assert (second.stdout, second.stderr) == (first.stdout, "")
    assert checkout.installations() == ["."]


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_it_installs_again_when_what_decides_has_changed(checkout: Checkout, changed: str) -> None:
    checkout.make_venv()
    (checkout.root / changed).write_text("# another\n")
    checkout.make_venv()
    assert checkout.installations() == [".", "."]


def test_a_larger_extra_contains_the_smaller_ones(checkout: Checkout) -> None:
    for extra in ("base", "test", "base", "dev", "test", "base"):
        assert checkout.make_venv(extra).returncode == 0
    assert checkout.installations() == [".", ".[test]", ".[dev]"]


def test_of_several_at_once_one_installs(checkout: Checkout) -> None:
    processes = [checkout.start() for _ in range(4)]
    outputs = [process.communicate(timeout=30) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert checkout.installations() == ["."]


def test_a_failed_installation_is_tried_again(checkout: Checkout) -> None:
    (checkout.root / "pip-fails").touch()
    failed = checkout.make_venv()
    assert failed.returncode != 0 and failed.stdout == ""
    assert "pip could not install the dependencies" in failed.stderr
    (checkout.root / "pip-fails").unlink()
    assert checkout.make_venv().returncode == 0
    assert len(checkout.installations()) == 2


def test_without_a_suitable_python_it_says_what_is_needed(checkout: Checkout) -> None:
    (checkout.root / "python-is-old").touch()
    result = checkout.make_venv()
    assert result.returncode != 0
    assert "needs Python 3.11, 3.12 or 3.13" in result.stderr and "MILES_PYTHON" in result.stderr
    assert not (checkout.root / ".venv").exists()


def test_a_venv_of_a_python_that_is_gone_is_left_alone(checkout: Checkout) -> None:
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    (checkout.root / ".venv" / "bin" / "python").symlink_to(checkout.root / "gone")
    result = checkout.make_venv()
    assert result.returncode != 0 and "remove it, or move it away" in result.stderr
    assert checkout.installations() == []


def test_a_half_made_venv_is_completed(checkout: Checkout) -> None:
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    assert checkout.make_venv().returncode == 0
    assert checkout.installations() == ["."]


def test_it_can_be_told_to_make_none(checkout: Checkout) -> None:
    assert checkout.make_venv(MILES_SKIP_VENV="1").stdout == "python\n"
    assert not (checkout.root / ".venv").exists()
