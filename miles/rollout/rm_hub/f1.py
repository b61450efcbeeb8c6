"""Token F1 of a short answer, as question answering data sets count it (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

_CLOSED_ANSWERS = ("yes", "no", "noanswer")  # right or wrong as a whole


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous spaces."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def f1_score(prediction: str | None, ground_truth: Any) -> tuple[float, float, float]:
    """(F1, precision, recall), each in [0, 1]; the best over the entries of a list of right answers.

    >>> f1_score("the red house", "a red barn")
    (0.5, 0.5, 0.5)
    """
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if prediction is None:
        return 0.0, 0.0, 0.0
    return max((_score(prediction, str(truth)) for truth in truths if truth is not None), default=(0.0, 0.0, 0.0))


def _score(prediction: str, truth: str) -> tuple[float, float, float]:
    prediction, truth = normalize_answer(prediction), normalize_answer(truth)
    if prediction != truth and (prediction in _CLOSED_ANSWERS or truth in _CLOSED_ANSWERS):
        return 0.0, 0.0, 0.0
    given, expected = prediction.split(), truth.split()
    common = (Counter(given) & Counter(expected)).total()
    if common == 0:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(given), common / len(expected)
    return 2 * precision * recall / (precision + recall), precision, recall
