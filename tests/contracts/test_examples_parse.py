"""Every launch script of the examples, and every marked command of the documentation, is accepted by the real parser.

A command is marked by a comment on the line before its block, and a file that it needs likewise:

    <!-- tested: check-config -->            a bash block: run with --check-config added
    <!-- tested: file my_reward.py -->       a Python block: written to that file first

They run in a copy of the checkout made of links, with the quickstart's data in it, and with a `python` that leaves out
the preparation and adds --check-config. So the flags, the files and the plug-ins are checked, and nothing starts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["examples/quickstart/run.sh"]  # those for GPUs are the subject of test_gpu_scripts.py
SHELL_FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("examples", "benchmarks", "scripts", "tests", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".sh", ".sbatch"} or path.name == "run"
)
PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
WALKTHROUGH = "docs/user-guide/training-script-walkthrough.md"

_BLOCK = re.compile(r"^<!-- tested: (?P<what>[^\n]+?) -->\n+```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


def marked_blocks(page: str) -> list[tuple[str, str]]:
    """(what, text) of each marked block."""
    return [(block["what"], block["text"]) for block in _BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to everything in the repository, but the quickstart's data is made here, with one supervised step."""
    root = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in {"examples", "runs", ".git", ".venv"}:
            (root / path.name).symlink_to(path)
    for path in (ROOT / "examples").rglob("*"):
        if path.is_file() and path.suffix in {".py", ".sh", ".md"} and "data" not in path.parts:
            link = root / path.relative_to(ROOT)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    prepare(root / "examples" / "quickstart" / "data", steps=1)
    return root


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With the `python` described above first on PATH, and nothing of a caller's own miles settings."""
    shim = tmp_path_factory.mktemp("bin") / "python"
    shim.write_text(f'#!/usr/bin/env bash\n[ "$1" = -m ] && exit 0\nexec "{sys.executable}" "$@" --check-config\n')
    shim.chmod(0o755)
    own = {name: value for name, value in os.environ.items() if not name.startswith("MILES_")}
    return own | {"PATH": f"{shim.parent}:{os.environ['PATH']}", "MILES_SKIP_VENV": "1"}


def run(command: list[str], checkout: Path, environment: dict[str, str]) -> str:
    """Standard output of an accepted command line."""
    result = subprocess.run(
        command,
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert not [line for line in result.stderr.splitlines() if "has no effect" in line], result.stderr
    return result.stdout


@pytest.mark.parametrize("script", SHELL_FILES)
def test_bash_can_read_it(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_examples_arguments_are_accepted(script: str, checkout: Path, environment: dict[str, str]) -> None:
    assert "hf_checkpoint" in run(["bash", str(checkout / script)], checkout, environment)


def test_further_arguments_win(checkout: Path, environment: dict[str, str]) -> None:
    script = str(checkout / "examples/quickstart/run.sh")
    shown = run(["bash", script, "--lr", "0", "--num-rollout", "3"], checkout, environment)
    assert re.search(r"^lr: 0(\.0)?$", shown, re.M) and "\nnum_rollout: 3\n" in shown


@pytest.mark.parametrize("page", PAGES)
def test_marked_commands_are_accepted(page: str, checkout: Path, environment: dict[str, str]) -> None:
    for what, text in marked_blocks(page):
        if what.startswith("file "):
            (checkout / what.removeprefix("file ")).write_text(text)
        else:
            assert what == "check-config", f"{page}: unknown mark {what!r}"
            assert "hf_checkpoint" in run(["bash", "-euo", "pipefail", "-c", text], checkout, environment)


def test_the_walkthrough_shows_the_environment_variable() -> None:
    commands = [text for what, text in marked_blocks(WALKTHROUGH) if what == "check-config"]
    assert commands and all("MILES_EXPERIMENTAL_ROLLOUT_REFACTOR=1" in text for text in commands)
