from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from miles.utils.logging_utils import log_hint

if TYPE_CHECKING:
    from pathlib import Path


def test_a_log_on_a_full_disk_says_nothing_on_the_console() -> None:
    code = (
        "import logging; from miles.utils.logging_utils import configure_logging\n"
        "configure_logging(file='/dev/full', console_level=logging.WARNING)\n"
        "for _ in range(3): logging.info('lost')\n"
        "logging.warning('shown')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].endswith("WARNING root: shown")


def test_only_a_log_that_was_written_is_pointed_to(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    assert log_hint(log) == ""
    log.write_text("")
    assert log_hint(log) == ""
    log.write_text("x\n")
    assert log_hint(log) == f"; see {log}"
    assert log_hint(log, "the traceback is in") == f"; the traceback is in {log}"
