r"""The DeepScaleR reward: only what follows the thinking counts, and it must hold a right \boxed{}."""

from __future__ import annotations

from typing import Any

from miles.rollout.rm_hub.math_utils import equivalent, extract_boxed_answer, grade_answer_sympy, unboxed

_MARKS = ("</think>", "###Response")


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 for a right answer, else 0. A label may be a list of right answers. Blocks; `deepscaler_reward` does not."""
    given = _answer_after_thinking(response)
    return int(given is not None and any(grade_answer_sympy(given, truth) for truth in _truths(label)))


async def deepscaler_reward(response: str, label: Any) -> int:
    """`get_deepscaler_rule_based_reward` without blocking the event loop."""
    given = _answer_after_thinking(response)
    if given is None:
        return 0
    for truth in _truths(label):
        if await equivalent(given, truth):
            return 1
    return 0


def _answer_after_thinking(response: str) -> str | None:
    """The boxed answer behind the last mark that ends the thinking; None without a mark, or without a box behind it."""
    for mark in _MARKS:
        if mark in response:
            return extract_boxed_answer(response.rpartition(mark)[2])
    return None


def _truths(label: Any) -> list[str]:
    labels = label if isinstance(label, list | tuple) else [label]
    return [unboxed(one) for one in labels if one is not None and str(one) != ""]
