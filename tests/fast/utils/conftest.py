from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fast.utils.command_lines import CommandLine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """A valid command line on a machine without a GPU, with the class-based rollout API switched on."""
    monkeypatch.setattr("miles.utils.arguments.cuda_device_present", lambda: False)
    monkeypatch.setenv("MILES_EXPERIMENTAL_ROLLOUT_REFACTOR", "1")
    return CommandLine.create(tmp_path)
