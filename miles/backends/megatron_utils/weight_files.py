"""Which files hold a checkpoint's weights, and whether they are whole: from their headers, without reading weights.

Standard library only, so that a command line can be checked without torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"


def check_weights(directory: str | Path) -> None:
    """Raise ValueError unless all weight files of the checkpoint are there and as long as their headers say."""
    directory = Path(directory)
    weight_map = read_index(directory)
    names = [SINGLE_FILE] if weight_map is None else sorted(set(weight_map.values()))
    for name in names:
        _check_file(directory / name)


def read_index(directory: Path) -> dict[str, str] | None:
    """Tensor name -> file name, from the checkpoint's index; None where it is one `model.safetensors` without an index.

    Raises ValueError for an index that cannot be read, and for a file that is missing.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise ValueError(
                f"the checkpoint {directory} has no {SINGLE_FILE} and no {INDEX_FILE}; "
                "weights are read from safetensors only, convert other formats first"
            )
        return None
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of weights: {error!r}") from error
    missing = sorted(name for name in files if not (directory / name).is_file())
    if missing:
        raise ValueError(f"the checkpoint {directory} lacks {', '.join(missing)}, which {INDEX_FILE} lists")
    return weight_map


def _check_file(path: Path) -> None:
    """A safetensors file is 8 bytes of header length, the header (JSON), and the tensors' bytes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if _LFS_POINTER.startswith(start) and len(start) == _LENGTH_BYTES:
            raise ValueError(f"{path} is a pointer of Git LFS, not the weights; download them with `git lfs pull`")
        if _LENGTH_BYTES + length > size:
            raise ValueError(f"{path} is not a safetensors file, or was cut off ({size} bytes)")
        header = file.read(length)
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is not a safetensors file: its header cannot be read ({error!r})") from error
    expected = _LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        raise ValueError(f"{path} has {size} bytes, but its header says {expected}; was the download cut off")
