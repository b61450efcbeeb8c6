from __future__ import annotations

import random

import pytest

from miles.backends.embedded_engine.detokenize import (
    IncrementalText,
    find_stop,
    hold_back_partial_stop,
    trim_stop,
)


class ByteTokenizer:
    """Token = byte; undecodable bytes become U+FFFD, as byte-level tokenizers do. Token 256 is special."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        special = b"" if skip_special_tokens else b"<s>"
        return b"".join(bytes([i]) if i < 256 else special for i in ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("skip", [True, False])
def test_incremental_text_ends_as_the_whole_text_and_only_grows(seed: int, skip: bool) -> None:
    rng = random.Random(seed)
    tokenizer = ByteTokenizer()
    text = "".join(rng.choice("ab é漢🙂") for _ in range(60))
    ids: list[int] = []
    for token in tokenizer.encode(text):
        ids.append(token)
        if rng.random() < 0.1 and len(ids) > 3 and ids[-1] < 128:
            ids.append(256)
    incremental = IncrementalText(tokenizer, skip)
    before = ""
    for end in range(1, len(ids) + 1):
        now = incremental.update(ids[:end])
        assert now.startswith(before)
        assert "\ufffd" not in now
        before = now
    assert before == tokenizer.decode(ids, skip)


def test_bytes_that_never_become_a_character_are_given_up() -> None:
    incremental = IncrementalText(ByteTokenizer(), True)
    ids: list[int] = []
    for _ in range(40):
        ids.append(0x80)
        incremental.update(ids)
    assert incremental.text.startswith("\ufffd")


def test_stop_strings() -> None:
    assert find_stop("abcdef", ("x", "cd", "b"), searched=0) == "cd"
    assert find_stop("abcdef", ("cd",), searched=3) == "cd"  # it began in the part that was searched
    assert find_stop("abcdef", ("ab",), searched=4) is None
    assert trim_stop("abcabc", "c") == "ab"
    assert trim_stop("ab", "c") == "ab"


def test_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    assert hold_back_partial_stop("abcEN", ("END", "Nx")) == "abc"
    assert hold_back_partial_stop("abcE!", ("END",)) == "abcE!"
    assert hold_back_partial_stop("", ("END",)) == ""
