"""Multiple choice as in GPQA: the letter that a response settles on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from miles.rollout.rm_hub.math_utils import extract_boxed_answer, normalize_answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LETTERS = "ABCDEFGHIJ"

# From the clearest to the vaguest; within one, the last occurrence counts.
_PATTERNS = (
    r"(?i:answer)\s*(?:(?i:is|choice|option)\s*)?[:=]?\s*[*_$]*\(?([A-J])\)?(?![A-Za-z])",
    r"(?i:option|choice)\s*[:=]?\s*[*_]*\(?([A-J])\)?(?![A-Za-z])",
    r"\(([A-J])\)",
    r"(?:^|\n)\s*[*_]*([A-J])[*_]*[.)]?\s*$",
)


def compute_gpqa_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1.0 where the response chooses the labelled option, else 0.0.

    `label`: a letter, the index of an option (from 0), or an option's text. metadata["choices"]: the options' texts, in
    order; metadata["correct_letter"] wins over the label.
    """
    choices = list((metadata or {}).get("choices") or [])
    correct = (metadata or {}).get("correct_letter") or _label_letter(label, choices)
    if correct is None:
        return 0.0
    answer = response.rpartition("</think>")[2]
    return float(_chosen_letter(answer, choices) == str(correct).strip().upper())


def _label_letter(label: Any, choices: Sequence[str]) -> str | None:
    if isinstance(label, int) and not isinstance(label, bool):
        return LETTERS[label] if 0 <= label < len(LETTERS) else None
    text = str(label if label is not None else "").strip()
    if re.fullmatch(r"\(?[A-Ja-j]\)?\.?", text):
        return text.strip("().").upper()
    return _letter_of_text(text, choices)


def _chosen_letter(answer: str, choices: Sequence[str]) -> str | None:
    valid = LETTERS[: len(choices)] if choices else LETTERS
    boxed = extract_boxed_answer(answer)
    if boxed is not None:
        text = normalize_answer(boxed).strip("().")
        return text.upper() if len(text) == 1 and text.upper() in valid else _letter_of_text(boxed, choices)
    for pattern in _PATTERNS:
        letters = [letter for letter in re.findall(pattern, answer) if letter in valid]
        if letters:
            return str(letters[-1])
    return _letter_of_text(answer.strip().rpartition("\n")[2], choices)


def _letter_of_text(text: str, choices: Sequence[str]) -> str | None:
    wanted = normalize_answer(text).casefold()
    options = [normalize_answer(str(choice)).casefold() for choice in choices[: len(LETTERS)]]
    return LETTERS[options.index(wanted)] if wanted and wanted in options else None
