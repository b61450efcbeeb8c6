"""Ctrl-C before a run can listen for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_STOPPED = 130


def exit_code_of(main: Callable[[], int]) -> int:
    """What `main()` returns; Ctrl-C while it still imports and checks is one line and an exit code, too."""
    try:
        return main()
    except KeyboardInterrupt:
        sys.stderr.write("\nmiles: stopped before anything was started\n")
        return EXIT_STOPPED
