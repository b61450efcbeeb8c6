"""`processes.json`: the process id of everything that a run consists of, for the user's tools."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE = "processes.json"


class ProcessList:
    """The file in `run_dir`. It is there once something was learned, and always whole."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._pids = {"driver": os.getpid()}

    def learn(self, pids: Mapping[str, int]) -> None:
        """Process ids by name; one that is known already replaces the former."""
        self._pids |= pids
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._pids, indent=2) + "\n")
        part.replace(self._path)
