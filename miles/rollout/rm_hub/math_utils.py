r"""Whether a mathematical answer is right: the last \boxed{} of a response against the label.

response --> \boxed{...} --> equal as text, after normalisation? --> right
                             two different words?                --> wrong
                             otherwise                           --> math-verify, in a process of its own
"""

from __future__ import annotations

import re
from typing import Any

from miles.rollout.rm_hub.grading import get_grader

_BOXES = ("\\boxed", "\\fbox")


def extract_boxed_answer(text: str) -> str | None:
    r"""The content of the last \boxed{...} (or \fbox, or "\boxed 5"); None where there is none, or it is cut off."""
    start = max(text.rfind(box) for box in _BOXES)
    if start < 0:
        return None
    rest = text[start:].partition("boxed" if text.startswith(_BOXES[0], start) else "fbox")[2]
    if not rest.lstrip().startswith("{"):
        match = re.match(r"\s+([^\s$\\]+)", rest)
        return match.group(1) if match else None
    rest = rest.lstrip()
    depth = 0
    for position, character in enumerate(rest):
        escaped = position > 0 and rest[position - 1] == "\\"
        depth += (character == "{" and not escaped) - (character == "}" and not escaped)
        if depth == 0:
            return rest[1:position].strip()
    return None


extract_answer = extract_boxed_answer


def normalize_answer(answer: str) -> str:
    r"""An answer without what does not change its meaning: spaces, \left, \text{}, $, \%, thousands separators."""
    text = answer.strip().strip("$").strip().rstrip(".")
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|displaystyle|limits|,|;|:|!|quad|qquad)(?![a-zA-Z])", "", text)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.replace("\\$", "").replace("\\%", "%").replace("^{\\circ}", "").replace("^\\circ", "")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"^(-?)\.(\d)", r"\g<1>0.\2", text)
    return re.sub(r"^(-?\d+)\.0*$", r"\1", text)


def settled_as_text(given: str, expected: str) -> bool | None:
    """The verdict where text is enough for one; None where only algebra can tell."""
    left, right = normalize_answer(given), normalize_answer(expected)
    if not left or not right:
        return False
    if left == right or (left.casefold() == right.casefold() and len(left) > 1 and left.isalpha()):
        return True
    if len(left) > 1 and len(right) > 1 and left.isalpha() and right.isalpha():
        return False  # read as algebra, "listen" is a product with the value of "silent"
    return None


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Whether two answers are the same text after normalisation."""
    return settled_as_text(given_answer, ground_truth) is True


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Whether two answers are mathematically equivalent. Blocks, for a bounded time; see `grading`."""
    verdict = settled_as_text(given_answer, ground_truth)
    return get_grader().equivalent(given_answer, ground_truth) if verdict is None else verdict


async def equivalent(given_answer: str, ground_truth: str) -> bool:
    """`grade_answer_sympy` without blocking the event loop."""
    verdict = settled_as_text(given_answer, ground_truth)
    return await get_grader().equivalent_async(given_answer, ground_truth) if verdict is None else verdict


def unboxed(label: Any) -> str:
    r"""A label as text, without the \boxed{} around it where it has one."""
    text = str(label)
    return extract_boxed_answer(text) or text


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    r"""Whether the last \boxed{} of `solution_str` is equivalent to `ground_truth`, boxed or not. Blocks."""
    given = extract_boxed_answer(solution_str)
    return given is not None and ground_truth is not None and grade_answer_sympy(given, unboxed(ground_truth))


async def math_reward(response: str, label: Any) -> int:
    r"""1 where the last \boxed{} of the response is equivalent to the label, else 0."""
    given = extract_boxed_answer(response)
    return int(given is not None and label is not None and await equivalent(given, unboxed(label)))
