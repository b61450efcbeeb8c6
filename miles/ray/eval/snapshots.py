"""The directories that snapshots for evaluation are exported to, and which of them stay."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.ray.eval.types import Weights


class SnapshotStore:
    """Names snapshots below `root` and deletes old ones: all but the newest `keep`, and never one in use.

    Only what this object has named is ever deleted.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self._keep = keep
        self._users: dict[Path, int] = {}  # oldest first

    @staticmethod
    def from_args(args: Namespace) -> SnapshotStore:
        root = Path(args.eval_hf_dir) if args.eval_hf_dir else Path(args.run_dir) / "eval_snapshots"
        return SnapshotStore(root.absolute(), args.eval_keep_snapshots)

    def begin(self, rollout_id: int, weights: Weights) -> Path:
        """The directory for a new snapshot, in use until `release`."""
        path = self.root / f"step_{rollout_id}_version_{weights.label}"
        users = self._users.pop(path, 0)
        self._users[path] = users + 1  # at the end: it is the newest
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def release(self, path: Path) -> None:
        """One user less of `path`; deletes what need not stay."""
        self._users[path] -= 1
        surplus = list(self._users)[: max(0, len(self._users) - self._keep)]
        for old in surplus:
            if self._users[old] == 0:
                shutil.rmtree(old, ignore_errors=True)
                del self._users[old]
