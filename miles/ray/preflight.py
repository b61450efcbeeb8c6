"""What can be told about a run before anything expensive starts, and `--check-config` tells too."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from miles.ray.resume import check_load, check_save
from miles.rollout.prompt_data import check_prompt_data
from miles.utils.memory.check import check_memory
from miles.utils.save_lock import check_nobody_writes, written_directories

if TYPE_CHECKING:
    from argparse import Namespace

_CLUSTER_PATHS = ("--hf-checkpoint", "--ref-load", "--runs-dir", "--save", "--load", "--save-hf")
_PACKAGES = ("ray", "torch", "megatron.core", "sglang_router", "transformers", "aiohttp")


def preflight(args: Namespace) -> None:
    """Raise ValueError where the run could not start: packages, prompt files, memory, directories that cannot be
    written, or that another run writes into; and where it would replace checkpoints that it does not go on from."""
    check_packages()
    check_cluster_paths(args)
    check_prompt_data(args)
    check_memory(args)
    if args.load is not None:
        check_load(args.load)
    for flag, path in (
        ("--runs-dir", args.runs_dir),
        ("--save", args.save),
        ("--save-hf", args.save_hf and args.save_hf.format(rollout_id=0)),
        ("--update-weight-disk-dir", args.update_weight_disk_dir),
    ):
        if path is not None:
            check_writable(flag, Path(path))
    for flag, directory in written_directories(args):
        check_nobody_writes(flag, directory)
    if args.save is not None:
        check_save(args.save, args.load)


def check_packages() -> None:
    """Raise ValueError naming the packages that this Python lacks."""
    missing = [name for name in _PACKAGES if not _is_installed(name)]
    if missing:
        raise ValueError(
            f"{sys.executable} lacks {', '.join(missing)}: activate the environment that miles is installed in "
            "(source .venv/bin/activate), or install miles there (pip install -e . -c constraints.txt)"
        )


def check_cluster_paths(args: Namespace) -> None:
    """Raise ValueError for a relative path where the run joins a cluster, whose processes start in other directories,
    and on other machines."""
    if not os.environ.get("RAY_ADDRESS"):
        return
    mistakes = [
        f"{flag} {path} is a relative path, and with RAY_ADDRESS set the run's processes start in other directories, "
        f"on whichever machine. Instead: an absolute path, such as {Path(path).absolute()}, on a disk that all see"
        for flag in _CLUSTER_PATHS
        if (path := getattr(args, flag[2:].replace("-", "_"), None)) and not Path(path).is_absolute()
    ]
    if mistakes:
        raise ValueError("\n".join(mistakes))


def check_writable(flag: str, directory: Path) -> None:
    """Raise ValueError where `directory` can neither be written to nor made."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    try:
        # The only answer that counts: permissions say nothing about a read-only or special file system.
        with tempfile.TemporaryDirectory(dir=existing, prefix=".miles-"):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {directory}: nothing can be written to {existing} ({error.strerror})") from error


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
