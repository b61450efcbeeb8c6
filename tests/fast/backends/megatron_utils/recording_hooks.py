"""User functions around training, as `--custom-megatron-*-path` names them: each notes down how it was called."""

from __future__ import annotations

from typing import Any

calls: list[tuple[str, tuple[Any, ...]]] = []


def init(*args: Any) -> None:
    calls.append(("init", args))


def before_log_prob(*args: Any) -> None:
    calls.append(("before_log_prob", args))


def before_train_step(*args: Any) -> None:
    calls.append(("before_train_step", args))


def post_save(*args: Any) -> None:
    calls.append(("post_save", args))
