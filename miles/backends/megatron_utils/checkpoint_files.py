"""The tensor files of a checkpoint set, written by several ranks at once and put together by rank 0.

    every writer:  tensors --at most 4 GiB a file--> model-part-<rank>-<n>, optimizer-part-<rank>-<n>
                   digests, and then .written-<rank>.json, which says what it wrote or why it could not
    rank 0:        waits for every .written-*.json -> final names, index, state.json -> publishes

Files and no collectives: writers and rank 0 may do this in threads of their own while the ranks go on training. All
ranks see the same directory, as they do on load.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from miles.backends.megatron_utils.safetensors_io import INDEX_FILE, SINGLE_FILE, groups, write_file
from miles.utils.file_errors import named_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import torch

MODEL = "model"
OPTIMIZER = "optimizer"
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class TensorFile:
    """A file that a writer has finished."""

    kind: str
    """MODEL or OPTIMIZER."""
    file: str
    names: tuple[str, ...]
    tensor_bytes: int
    file_bytes: int
    blake2b: str


def write_tensors(
    part: Path,
    kind: str,
    rank: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    max_file_bytes: int = 4 * 1024**3,
) -> Iterator[TensorFile]:
    """Write what `tensors` yields; at most one file's worth is held in memory at a time."""
    for number, group in enumerate(groups(tensors, max_file_bytes)):
        path = part / f"{kind}-part-{rank:05d}-{number:05d}.safetensors"
        write_file({name: tensor.detach().cpu().contiguous() for name, tensor in group}, path)
        yield TensorFile(
            kind=kind,
            file=path.name,
            names=tuple(name for name, _ in group),
            tensor_bytes=sum(tensor.nbytes for _, tensor in group),
            file_bytes=path.stat().st_size,
            blake2b=_digest(path),
        )


def write_part(part: Path, rank: int, tensors: Iterable[tuple[str, str, torch.Tensor]]) -> None:
    """Write this rank's tensors (kind, name, tensor; those of a kind behind each other), and say that it is done.

    Raises:
        OSError: the disk is full, for example; rank 0 is told as well.
    """
    files: list[TensorFile] = []
    try:
        for kind, own in groupby(tensors, key=itemgetter(0)):
            files.extend(write_tensors(part, kind, rank, ((name, tensor) for _, name, tensor in own)))
    except BaseException as error:
        write_manifest(part, rank, [], error)
        raise
    write_manifest(part, rank, files)


def write_manifest(part: Path, rank: int, files: Sequence[TensorFile], error: BaseException | None = None) -> None:
    """Say that this rank is done. Appears complete or not at all."""
    record = {"files": [asdict(file) for file in files], "error": None if error is None else str(error)}
    path = _manifest(part, rank)
    unfinished = path.with_suffix(".part")
    with named_errors(path):
        unfinished.write_text(json.dumps(record), encoding="utf-8")
    os.replace(unfinished, path)


def take_manifests(part: Path, writers: Iterable[int], *, timeout_secs: float) -> list[TensorFile]:
    """Wait for all writers, and return their files, in the order of the ranks. The manifests are removed.

    Raises:
        OSError: a writer could not write, or is not done after `timeout_secs`.
    """
    deadline = time.monotonic() + timeout_secs
    files: list[TensorFile] = []
    for rank in sorted(writers):
        path = _manifest(part, rank)
        while not path.is_file():
            if time.monotonic() > deadline:
                raise OSError(f"{part}: trainer rank {rank} has not written its part within {timeout_secs:.0f} s")
            time.sleep(_POLL_SECONDS)
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["error"] is not None:
            raise OSError(f"{part}: trainer rank {rank} could not write its part: {record['error']}")
        files.extend(TensorFile(**{**values, "names": tuple(values["names"])}) for values in record["files"])
        path.unlink()
    return files


def assemble(part: Path, files: Sequence[TensorFile]) -> dict[str, dict[str, Any]]:
    """Give all files their final names and write the index of the model; what `state.json` says about each of them.

    The index is there for a single file, too: without one, engines load every safetensors file of a directory as
    weights, and here the optimizer's are among them.
    """
    known: dict[str, dict[str, Any]] = {}
    for kind in (MODEL, OPTIMIZER):
        own = [file for file in files if file.kind == kind]
        weight_map: dict[str, str] = {}
        for number, file in enumerate(own, start=1):
            final = _final_name(kind, number, len(own))
            (part / file.file).rename(part / final)
            weight_map |= dict.fromkeys(file.names, final)
            known[final] = {"bytes": file.file_bytes, "blake2b": file.blake2b}
        if kind == MODEL:
            index = {"metadata": {"total_size": sum(file.tensor_bytes for file in own)}, "weight_map": weight_map}
            with named_errors(part / INDEX_FILE):
                (part / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return known


def optimizer_files(checkpoint: Path) -> list[Path]:
    """The files that hold the optimizer's state of a set; none where it was saved without."""
    return sorted(checkpoint.glob(f"{OPTIMIZER}*.safetensors"))


def _final_name(kind: str, number: int, count: int) -> str:
    if count == 1:
        return SINGLE_FILE if kind == MODEL else f"{kind}.safetensors"
    return f"{kind}-{number:05d}-of-{count:05d}.safetensors"


def _manifest(part: Path, rank: int) -> Path:
    return part / f".written-{rank:05d}.json"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
