r"""The DAPO reward: the last "Answer: ..." line of a response against the label, as text; 1 or -1.

Numbers, not equivalence: "1/2" is wrong where the label says "0.5". The normalisation follows the one described for
Minerva (Lewkowycz et al. 2022, appendix D.1).
"""

from __future__ import annotations

import re
from typing import Any

from miles.rollout.rm_hub.math_utils import extract_boxed_answer, unboxed

CHARS_LOOKED_AT = 300  # an answer stands at the end; a response that lists many would match by chance
INVALID = "[INVALID]"

_UNITS = (
    r"square units|units?|degrees?|dollars?|cents?|percent|feet|foot|inch(?:es)?|meters?|miles?|cm|km|kg|mph|hours?|"
    r"minutes?|seconds?|days?|years?|points?|people|students"
)
_UNIT_PATTERN = re.compile(rf"(?<=[\d}}\s])\s*\b(?:{_UNITS})\b", re.IGNORECASE)
_WRAPPERS = re.compile(r"\\(?:text|textbf|mathrm|overline|boxed|mbox)\s*\{([^{}]*)\}")


def normalize_final_answer(final_answer: str) -> str:
    """An answer in the form in which two of them are compared as text."""
    text = str(final_answer).split("=")[-1]
    math_part = re.search(r"\$([^$]+)\$", text)
    text = math_part.group(1) if math_part else text
    for removed in (
        "\\left",
        "\\right",
        "\\!",
        "\\,",
        "\\;",
        "\\ ",
        "\\$",
        "\\%",
        "%",
        "$",
        "^\\circ",
        "^{\\circ}",
        "\\\\",
    ):
        text = text.replace(removed, "")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cdot", "*")
    text = _WRAPPERS.sub(r"\1", text)
    text = _UNIT_PATTERN.sub("", text)
    text = re.sub(r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"^(?:an?|the)\s+", "", text.strip(), flags=re.IGNORECASE)
    text = re.sub(r"\s+", "", text).strip(".")
    whole_number = text.replace(",", "")
    return whole_number if re.fullmatch(r"-?\d+", whole_number) else text


def last_boxed_only_string(string: str) -> str | None:
    r"""The last \boxed{...} with its box; None where there is none."""
    content = extract_boxed_answer(string)
    return None if content is None else f"\\boxed{{{content}}}"


def remove_boxed(string: str) -> str:
    r"""The content of \boxed{...}."""
    content = extract_boxed_answer(string)
    if content is None:
        raise ValueError(f"not a \\boxed{{...}}: {string!r}")
    return content


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = r"(?i)Answer\s*:\s*([^\n]+)"
) -> tuple[bool, str]:
    """(right, the normalised answer) for the last match of `answer_pattern`; "[INVALID]" where nothing matches."""
    matches = re.findall(answer_pattern, solution_str)
    prediction = normalize_final_answer(matches[-1] if matches else INVALID)
    truth = normalize_final_answer(unboxed(gt) if gt_need_extract else gt)
    return prediction == truth, prediction


def is_correct_strict_box(solution_str: str, gt: str) -> tuple[bool, str | None]:
    r"""(right, the answer) for the last \boxed{}, compared as it stands."""
    prediction = extract_boxed_answer(solution_str)
    return prediction == gt, prediction


def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    """{"score": 1.0 or -1.0, "acc": right or not, "pred": the answer that was read}. Use with `--reward-key score`."""
    end, truth = solution_str[-CHARS_LOOKED_AT:], str(ground_truth)
    correct, prediction = is_correct_strict_box(end, truth) if strict_box_verify else is_correct_minerva(end, truth)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}
