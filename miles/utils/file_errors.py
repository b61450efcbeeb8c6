"""Errors of files, with the file's name: a failed write, as on a full disk, does not carry it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def named_errors(path: str | Path) -> Iterator[None]:
    """An OSError within that names no file becomes the same one with `path` in it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
