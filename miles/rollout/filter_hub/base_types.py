"""The contract of dynamic filters: `fn(args, group, **kwargs) -> DynamicFilterOutput | bool`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class DynamicFilterOutput:
    """The verdict on one group. `reason` is a short word for the metrics: why a group is not kept."""

    keep: bool
    reason: str | None = None


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """The verdict of `fn`. Without a filter every group is kept; a bare bool is a verdict without a reason.

    Raises TypeError naming the function where it returns anything else: None, a forgotten `return`, is no verdict.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    verdict = fn(*args, **kwargs)
    if isinstance(verdict, DynamicFilterOutput):
        return verdict
    if isinstance(verdict, bool) or type(verdict).__name__ in ("bool_", "bool"):  # numpy's bool is not a bool
        return DynamicFilterOutput(keep=bool(verdict))
    name = getattr(fn, "__qualname__", repr(fn))
    raise TypeError(f"dynamic filter {name} returned {verdict!r}: expected a DynamicFilterOutput or a bool")


class MetricGatherer:
    """Counts the dropped groups of one rollout by reason. Groups dropped without a reason are not counted."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        if reason:
            self._drops[reason] += 1

    def collect(self) -> dict[str, int]:
        """{"rollout/dynamic_filter/drop_<reason>": groups}"""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._drops.items()}
