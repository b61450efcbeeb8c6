"""The quickstart's task: sort 4 to 6 digits. ``52914>`` must be answered with ``12459``."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRAIN_PROMPTS = 4096
EVAL_PROMPTS = 256
SEED = 1234


def prompt_of(digits: str) -> str:
    return f"{digits}>"


def answer_of(digits: str) -> str:
    return "".join(sorted(digits))


def random_digits(rng: random.Random) -> str:
    """4, 5 or 6 digits, each length equally likely; digits repeat."""
    return "".join(rng.choices("0123456789", k=rng.randint(4, 6)))


def is_held_out(digits: str) -> bool:
    """Every multiset whose digits sum to a multiple of 7 is kept for evaluation: about one seventh of all problems.

    The rule looks at the answer alone, so a reordering of an evaluation problem is never trained on either, neither by
    the base model nor by reinforcement learning.
    """
    return sum(map(int, digits)) % 7 == 0


def problems(rng: random.Random, *, held_out: bool) -> Iterator[str]:
    """Endless digits from one side of the split."""
    while True:
        digits = random_digits(rng)
        if is_held_out(digits) == held_out:
            yield digits


def write_prompts(path: Path, *, count: int, held_out: bool, seed: int) -> None:
    """Write ``count`` distinct problems as JSON lines: ``{"input": "52914>", "label": "12459", "metadata": {...}}``."""
    distinct: dict[str, None] = {}
    for digits in problems(random.Random(seed), held_out=held_out):
        distinct[digits] = None
        if len(distinct) == count:
            break
    with path.open("w", encoding="utf-8") as file:
        for digits in distinct:
            row = {"input": prompt_of(digits), "label": answer_of(digits), "metadata": {"num_digits": len(digits)}}
            file.write(json.dumps(row) + "\n")


def make_prompts(directory: Path) -> None:
    """Write ``train.jsonl`` and ``eval.jsonl`` into an existing directory. The same bytes each time."""
    write_prompts(directory / "train.jsonl", count=TRAIN_PROMPTS, held_out=False, seed=SEED)
    write_prompts(directory / "eval.jsonl", count=EVAL_PROMPTS, held_out=True, seed=SEED + 1)
