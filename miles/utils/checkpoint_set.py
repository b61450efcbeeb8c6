"""One checkpoint set: what a run must have to go on after `rollout_id`, in one directory that appears by one rename.

    <save>/
      latest_checkpointed_iteration.txt   the rollout id of the newest set; written after the rename
      iter_0000042/                       a set: complete, or refused as a whole
        state.json                        rollout id, weight version, lineage, ...; size and digest of every other file,
                                          and the digest of what it says itself
        config.json, model*.safetensors   the trainer's part (`miles.backends.megatron_utils.checkpoint`) ...
        optimizer*.safetensors, rng.safetensors
        rollout/state.json                the rollout side's part (`miles.ray.rollout.rollout_state`)
      .rollout-0000043-<pid>.json         the rollout side's part of a set that is being written
      .part-iter_0000043-<pid>/           a set that is being written

This module knows sets as directories and files. The driver asks it once which set a run resumes from
(`newest_readable`), and trainer and rollout side load exactly that one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.utils.file_errors import named_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

POINTER = "latest_checkpointed_iteration.txt"
FORMAT = 3
READABLE_FORMATS = (1, 2, 3)
"""2 has no digest of `state.json` itself, and 1 no rollout part either; otherwise they are the same."""
STATE_FILE = "state.json"
ROLLOUT_FILE = "rollout/state.json"
_OWN_DIGEST = "blake2b"
_SET_NAME = re.compile(r"iter_(\d{7,})")


def set_path(directory: str | Path, rollout_id: int) -> Path:
    """Where the set after `rollout_id` is kept."""
    return Path(directory) / f"iter_{rollout_id:07d}"


def rollout_id_of(checkpoint: str | Path) -> int:
    """The rollout after which the set at this path was saved. Raises ValueError for another kind of path."""
    found = _SET_NAME.fullmatch(Path(checkpoint).name)
    if found is None:
        raise ValueError(f"{checkpoint} is not a checkpoint set: its name is not iter_<rollout id>")
    return int(found[1])


def newest_readable(directory: str | Path) -> Path | None:
    """The set under `directory` to resume from; None where there is none at all.

    A set that is not whole is refused with a warning that says why, and the one before it is taken. Reads every file
    of the sets it looks at.

    Raises:
        ValueError: there are sets, but none is readable.
    """
    refused = []
    for candidate in candidates(directory):
        problem = verify(candidate)
        if problem is None:
            return candidate
        logger.warning("checkpoint %s is refused: %s; trying the one before it", candidate, problem)
        refused.append(f"{candidate.name}: {problem}")
    if refused:
        raise ValueError(f"--load {directory}: no checkpoint there is readable ({'; '.join(refused)})")
    return None


def candidates(directory: str | Path) -> list[Path]:
    """The sets in the order in which they are tried: the one that the pointer names, those before it from new to old,
    then those after it (of a run that was killed before it wrote the pointer, or that the user went back behind)."""
    root = Path(directory)
    if not root.is_dir():
        return []
    numbered = {rollout_id_of(path): path for path in root.iterdir() if _SET_NAME.fullmatch(path.name)}
    pointer = root / POINTER
    pointed = pointer.read_bytes().strip() if pointer.is_file() else b""
    newest = int(pointed) if pointed.isdigit() else max(numbered, default=0)
    order = sorted(numbered, key=lambda i: (i > newest, -i))
    return [numbered[i] for i in order]


def is_complete(checkpoint: Path) -> bool:
    """Whether this is a set that a run has published, however it has fared since: nothing but its name is read."""
    return _SET_NAME.fullmatch(checkpoint.name) is not None and (checkpoint / STATE_FILE).is_file()


def newest_complete(directory: str | Path) -> Path | None:
    """The set that is tried first on a resume, by name alone; None where none can be found."""
    try:
        return next(filter(is_complete, candidates(directory)), None)
    except OSError:
        return None


def verify(checkpoint: Path) -> str | None:
    """What is wrong with a set, or None where every file is there and has its digest."""
    try:
        record = read_record(checkpoint)
        files = {name: (entry["bytes"], entry["blake2b"]) for name, entry in record["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{STATE_FILE} cannot be read ({type(error).__name__}: {error})"
    if record.get("format") not in READABLE_FORMATS:
        return f"{STATE_FILE} has format {record.get('format')!r}, this version reads {FORMAT}"
    if record["format"] >= 3 and record.get(_OWN_DIGEST) != _digest_of_record(record):
        return f"{STATE_FILE} is damaged (its digest differs)"
    if record.get("rollout_id") != rollout_id_of(checkpoint):
        return f"{STATE_FILE} is of rollout {record.get('rollout_id')!r}"
    for name, (size, digest) in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _digest(path) != digest:
            return f"{name} is damaged (its digest differs)"
    return None


def read_record(checkpoint: Path) -> dict[str, Any]:
    """What `state.json` of a set says."""
    record: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    return record


def write_record(part: Path, record: dict[str, Any], known: Mapping[str, dict[str, Any]] | None = None) -> None:
    """Write `state.json` of a set whose other files are all there. `known`: size and digest of files by name, which
    need not be read again."""
    record = {"format": FORMAT, **record, "files": _describe_files(part, known or {})}
    record[_OWN_DIGEST] = _digest_of_record(record)
    with named_errors(part / STATE_FILE):
        (part / STATE_FILE).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def write_pointer(directory: str | Path, rollout_id: int) -> None:
    """Name the newest set, for people and for tools."""
    part = Path(directory) / f".{POINTER}.part"
    with named_errors(part):
        part.write_text(f"{rollout_id}\n", encoding="utf-8")
    os.replace(part, Path(directory) / POINTER)


def remove_abandoned_parts(directory: str | Path) -> None:
    """Remove what runs that were killed while they saved have left behind."""
    for part in Path(directory).glob(".part-iter_*"):
        logger.info("removing %s, which a run that was killed has left", part)
        shutil.rmtree(part, ignore_errors=True)


# --- the rollout side's part ---


def staged_rollout_path(directory: str | Path, rollout_id: int) -> Path:
    """Where the rollout side writes its part for the trainer to take; parts that nobody took are removed."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    for abandoned in root.glob(".rollout-*.json"):
        abandoned.unlink(missing_ok=True)
    return root / f".rollout-{rollout_id:07d}-{os.getpid()}.json"


def take_rollout_part(staged: str | Path, part: Path) -> None:
    """Move the rollout side's part into a set that is being written."""
    target = part / ROLLOUT_FILE
    target.parent.mkdir()
    os.replace(staged, target)


def rollout_part(checkpoint: Path) -> Path | None:
    """The rollout side's part of a set; None where it was saved without one."""
    path = checkpoint / ROLLOUT_FILE
    return path if path.is_file() else None


def _describe_files(part: Path, known: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    names = sorted(path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file())
    return {name: known.get(name) or _describe(part / name) for name in names}


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "blake2b": _digest(path)}


def _digest_of_record(record: Mapping[str, Any]) -> str:
    """Over what the record says, not how it is laid out in the file."""
    said = json.dumps({key: value for key, value in record.items() if key != _OWN_DIGEST}, sort_keys=True)
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
