"""Each row of the table of faults names tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / "docs" / "user-guide" / "fault-tolerance.md"


def rows() -> list[tuple[str, list[str]]]:
    """What dies, and the tests of its row."""
    table = PAGE.read_text(encoding="utf-8").split("## What dies, and what happens")[1]
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [(row[0].strip(), re.findall(r"`(test_\w+)`", row[-1])) for row in cells[2:]]


@pytest.fixture(scope="module")
def known_tests() -> set[str]:
    sources = (path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py"))
    return {name for source in sources for name in re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE)}


def test_each_fault_has_a_test_that_exists(known_tests: set[str]) -> None:
    assert len(rows()) > 10
    for fault, tests in rows():
        assert tests, f"{fault}: no test is named"
        assert set(tests) <= known_tests, f"{fault}: there is no {set(tests) - known_tests}"
