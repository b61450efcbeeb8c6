"""Weight versions on disk, as directories that share the files which did not change.

    <directory>/version-00000006/  weights-00000.safetensors  weights-00001.safetensors  ...
    <directory>/version-00000007/  (linked: same bytes)       (written)                  ...
                                   model.safetensors.index.json  digests.json  config.json  tokenizer files

Tensors are cut into files by their order and size alone, so a file holds the same tensors in every version, and one
whose digest is that of the version before is hard-linked, unless its owner or mode is not that of a new one. A version
is written under another name and appears by one rename: a crash leaves the versions before it as they were. Each is a
complete Hugging Face checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from miles.backends.megatron_utils.hf_export import copy_model_files, publish
from miles.backends.megatron_utils.safetensors_io import write_file
from miles.backends.megatron_utils.weight_files import INDEX_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from miles.backends.megatron_utils.wire import NamedTensor, Piece

logger = logging.getLogger(__name__)

DIGESTS_FILE = "digests.json"
_FILE_BYTES = 64 * 1024**2
_KEPT = 2
"""The current version, and the one before it, from which an engine may still be reading."""
_NAME = re.compile(r"version-(\d{8})")


class WeightVersions:
    """The versions in one directory, which belongs to one run at a time."""

    def __init__(self, directory: str | Path, *, source: str | Path, file_bytes: int = _FILE_BYTES) -> None:
        """`source`: the checkpoint whose config and tokenizer are put beside the weights."""
        self._directory = Path(directory).absolute()
        self._source = Path(source)
        self._file_bytes = file_bytes
        self.bytes_written = 0
        """By the last `write`; what was linked does not count."""

    def path(self, version: int) -> Path:
        return self._directory / f"version-{version:08d}"

    def write(self, pieces: Iterable[Piece], version: int, *, dtype: torch.dtype | None = None) -> Path:
        """Publish all weights that `pieces` yields, cast to `dtype`; returns the directory. Replaces one of that name.

        Raises OSError naming the file that could not be written.
        """
        base = self._base(version)
        digests = _read_digests(base) if base is not None else {}
        weight_map: dict[str, str] = {}
        found: dict[str, str] = {}
        kinds: set[torch.dtype] = set()
        self.bytes_written = total = 0
        with publish(self.path(version)) as part:
            for i, group in enumerate(_groups(pieces, dtype, self._file_bytes)):
                name = f"weights-{i:05d}.safetensors"
                found[name] = _digest(group)
                same = base is not None and digests.get(name) == found[name]
                if not (same and base is not None and _linked(base / name, part / name)):
                    write_file(dict(group), part / name)
                    self.bytes_written += sum(tensor.nbytes for _, tensor in group)
                weight_map |= dict.fromkeys((key for key, _ in group), name)
                kinds |= {tensor.dtype for _, tensor in group}
                total += sum(tensor.nbytes for _, tensor in group)
            copy_model_files(self._source, part, dtypes=kinds)
            _write_json(part / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
            _write_json(part / DIGESTS_FILE, found)
        return self.path(version)

    def prune(self, version: int) -> None:
        """Remove all but `version` and the one before it. Also later ones: a run that was resumed has left them."""
        earlier = sorted(found for found in self._versions() if found <= version)
        for found in set(self._versions()) - set(earlier[-_KEPT:]):
            shutil.rmtree(self.path(found), ignore_errors=True)

    def _base(self, version: int) -> Path | None:
        """The version to link from: the newest that is not later, else any."""
        versions = self._versions()
        newest = max((found for found in versions if found <= version), default=max(versions, default=None))
        return self.path(newest) if newest is not None else None

    def _versions(self) -> list[int]:
        if not self._directory.is_dir():
            return []
        return [int(match[1]) for path in self._directory.iterdir() if (match := _NAME.fullmatch(path.name))]


def _groups(pieces: Iterable[Piece], dtype: torch.dtype | None, max_bytes: int) -> Iterator[list[NamedTensor]]:
    """Consecutive tensors of up to `max_bytes` together, in host memory; a larger one goes alone."""
    group: list[NamedTensor] = []
    size = 0
    for piece in pieces:
        while piece:
            name, tensor = piece.pop(0)
            ready = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
            if group and size + ready.nbytes > max_bytes:
                yield group
                group, size = [], 0
            group.append((name, ready))
            size += ready.nbytes
    if group:
        yield group


def _digest(group: list[NamedTensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in group:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_digests(directory: Path) -> dict[str, str]:
    """{} where they cannot be read: then everything is written anew."""
    try:
        digests = json.loads((directory / DIGESTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return digests if isinstance(digests, dict) else {}


def _linked(source: Path, target: Path) -> bool:
    """False where `target` must be written: a link keeps owner and mode, which would shut out the engines that a file
    made now lets in (or let in whom it shuts out)."""
    target.touch()
    as_new = _access(target)
    target.unlink()
    try:
        if (access := _access(source)) != as_new:
            logger.info("%s is written anew: %s instead of %s", target.name, as_new, access)
            return False
        os.link(source, target)
    except OSError as error:  # a file system without hard links, or a file that is gone
        logger.info("%s is written anew: %s", target.name, error)
        return False
    return True


def _access(path: Path) -> str:
    """Who may read and write a file."""
    found = path.stat()
    return f"mode {stat.S_IMODE(found.st_mode):04o} of {found.st_uid}:{found.st_gid}"


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
