"""Independent mistakes of a command line, reported together."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Mistakes:
    """Collects lines; `raise_any` turns them into one ValueError, one line a mistake."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, lines: Iterable[str]) -> None:
        """Each line once."""
        self.lines += [line for line in dict.fromkeys(lines) if line not in self.lines]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A block whose ValueError becomes a mistake; what follows the block goes on. Other exceptions fly."""
        try:
            yield
        except ValueError as error:
            self.add(str(error).splitlines())

    def mentions(self, flag: str) -> bool:
        """Whether a mistake names this flag already."""
        words = (word.strip("(),:;.") for line in self.lines for word in line.split())
        return flag in words

    def raise_any(self) -> None:
        """Raise ValueError where there is a mistake."""
        if self.lines:
            raise ValueError("\n".join(self.lines))
