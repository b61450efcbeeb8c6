"""Weights of a Hugging Face checkpoint, from safetensors files only: a format that holds bytes and cannot hold code."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from miles.backends.megatron_utils.weight_files import INDEX_FILE, SINGLE_FILE, read_index
from miles.utils.file_errors import named_errors
from miles.utils.grouping import groups_up_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch


class SafetensorsReader:
    """Reads tensors by name from `model.safetensors`, or from the shards that `model.safetensors.index.json` lists, or
    from the `files` that are given.

    Use as a context manager. `reader[name]` raises ValueError naming the checkpoint where the tensor is missing.
    """

    def __init__(self, directory: str | Path, files: Iterable[Path] | None = None) -> None:
        self.directory = Path(directory)
        self._file_of = _locate(self.directory) if files is None else _contents(files)
        self._open: dict[Path, safe_open] = {}

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor, or None where there is none of this name."""
        return self[name] if name in self._file_of else None

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise ValueError(f"the checkpoint {self.directory} has no tensor {name!r}")
        return self._handle(self._file_of[name]).get_tensor(name)

    def _handle(self, path: Path) -> safe_open:
        if path not in self._open:
            handle = _open(path)
            self._open[path] = handle.__enter__()
        return self._open[path]


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


def _locate(directory: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it."""
    weight_map = read_index(directory)
    if weight_map is not None:
        return {name: directory / file for name, file in weight_map.items()}
    return _contents([directory / SINGLE_FILE])


def _contents(files: Iterable[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in files:
        with _open(path) as handle:
            found |= dict.fromkeys(handle.keys(), path)
    return found


def write_sharded(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, max_shard_bytes: int = 4 * 1024**3
) -> None:
    """Write named tensors as `model.safetensors`, or as numbered shards with an index above `max_shard_bytes`.

    At most one shard is held in memory at a time.
    """
    shards: list[list[str]] = []
    total = 0
    for group in groups(tensors, max_shard_bytes):
        write_file({name: t.detach().cpu().contiguous() for name, t in group}, _part(directory, len(shards)))
        shards.append([name for name, _ in group])
        total += sum(t.nbytes for _, t in group)
    if len(shards) == 1:
        _part(directory, 0).rename(directory / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _part(directory, i).rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with named_errors(directory / INDEX_FILE):
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write one safetensors file, which other users may read as far as the umask (or the directory's ACL) lets them.

    Raises OSError naming it where that fails, as on a full disk.
    """
    try:
        path.touch()
        mode = stat.S_IMODE(path.stat().st_mode)
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors gives its files mode 0600
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def _part(directory: Path, i: int) -> Path:
    return directory / f"part-{i:05d}.safetensors"


def groups(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Consecutive tensors grouped so that no group exceeds `max_bytes`, unless one tensor alone does."""
    return groups_up_to(max_bytes, tensors, lambda named: named[1].nbytes)
