"""Text that grows token by token, for streaming and for stop strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles.backends.embedded_engine.tokenizer import Tokenizer

_CONTEXT_TOKENS = 6
"""Tokens decoded again before each new one, so that the tokenizer sees how words join."""

_REPLACEMENT = "\ufffd"

_MAX_PENDING_TOKENS = 16
"""No character is longer: after so many tokens the bytes are not text, and are taken as they are."""


class IncrementalText:
    """The text of a growing token list, at a cost per token that does not grow with the list.

    A token that ends inside a multi-byte character adds nothing until the character is whole.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._prefix = 0  # tokens before this one are no longer looked at
        self._read = 0  # tokens before this one are in `text`
        self.text = ""

    def update(self, ids: list[int]) -> str:
        """Take in the tokens of `ids` (the whole list, append-only) that are new; returns the text so far."""
        if len(ids) == self._read:
            return self.text
        window = ids[self._prefix :]
        before = self._decode(window[: self._read - self._prefix])
        after = self._decode(window)
        if not after.endswith(_REPLACEMENT) or len(ids) - self._read > _MAX_PENDING_TOKENS:
            self.text += after[len(before) :]
            self._read = len(ids)
            self._prefix = max(self._prefix, self._read - _CONTEXT_TOKENS)
        return self.text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens) if ids else ""


def find_stop(text: str, stops: tuple[str, ...], searched: int) -> str | None:
    """The first of `stops` that occurs in `text`; the first `searched` characters were looked through before."""
    for stop in stops:
        if text.find(stop, max(0, searched - len(stop) + 1)) >= 0:
            return stop
    return None


def trim_stop(text: str, stop: str) -> str:
    """`text` up to the first occurrence of `stop`."""
    position = text.find(stop)
    return text if position < 0 else text[:position]


def hold_back_partial_stop(text: str, stops: tuple[str, ...]) -> str:
    """`text` without an end that may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if stop.startswith(text[-size:]):
                longest = size
                break
    return text[: len(text) - longest]
