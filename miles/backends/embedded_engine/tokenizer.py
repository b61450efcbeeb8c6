"""Text to token ids and back, through the fast `tokenizers` library where the model directory allows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


class FastTokenizer:
    """A `tokenizer.json`."""

    def __init__(self, file: Path) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


class SlowTokenizer:
    """Any other tokenizer that transformers can load without running code from the directory."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def load_tokenizer(directory: str) -> Tokenizer | None:
    """The tokenizer of a model directory, or None where it has none (requests then bring input_ids)."""
    path = Path(directory)
    if (path / "tokenizer.json").is_file():
        return FastTokenizer(path / "tokenizer.json")
    if any((path / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
        return SlowTokenizer(path)
    return None


def end_token_ids(directory: str, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids that end an answer: those of config.json, generation_config.json and the tokenizer together."""
    path = Path(directory)
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _read_json(path / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    token = _read_json(path / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str) and isinstance(tokenizer, FastTokenizer):
        token_id = tokenizer._tokenizer.token_to_id(token)
        found.update([] if token_id is None else [token_id])
    return frozenset(found)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
