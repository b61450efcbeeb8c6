"""Writes Hugging Face checkpoints: config, tokenizer files, safetensors."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from miles.backends.megatron_utils.safetensors_io import INDEX_FILE, write_sharded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".py", ".md"}
"""Weights in other formats, code, and the model card: what is not config or tokenizer."""


def export_hf_checkpoint(
    directory: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], *, source: str | Path
) -> None:
    """Write `tensors` with the config and tokenizer files of `source` as `directory`, which appears complete or not at
    all (a former export there is replaced)."""
    with publish(Path(directory)) as part:
        write_hf_files(part, tensors, source=Path(source))


def write_hf_files(directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, source: Path) -> None:
    """The files of a Hugging Face checkpoint, straight into an existing directory."""
    dtypes: set[torch.dtype] = set()

    def seen() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            dtypes.add(tensor.dtype)
            yield name, tensor

    write_sharded(directory, seen())
    copy_model_files(source, directory, dtypes=dtypes)


def copy_model_files(source: Path, directory: Path, *, dtypes: set[torch.dtype]) -> None:
    """Config and tokenizer files, with the number format of the weights beside them."""
    for file in source.iterdir():
        if file.is_file() and file.suffix not in _NOT_COPIED and file.name != INDEX_FILE:
            shutil.copyfile(file, directory / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(next(iter(dtypes))).removeprefix("torch.") if len(dtypes) == 1 else "float32"
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """A directory to write into that becomes `target` by a rename when the block ends, and is removed when it raises.

    Everything is flushed to disk before the rename. A `target` that was there before is moved away right before and
    removed right after it: a crash leaves the new one, the old one, or, between the two renames, none.
    """
    for abandoned in target.parent.glob(f".part-{target.name}-*"):  # by a run that was killed
        shutil.rmtree(abandoned, ignore_errors=True)
    part = target.parent / f".part-{target.name}-{os.getpid()}"
    replaced = part.with_name(f"{part.name}-replaced")
    part.mkdir(parents=True)
    try:
        yield part
        for file in part.rglob("*"):
            _flush_to_disk(file)
        _flush_to_disk(part)
        if target.exists():
            target.rename(replaced)
        part.rename(target)
        _flush_to_disk(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
