"""The contract of dynamic filters: `fn(args, group, **kwargs) -> DynamicFilterOutput | bool`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.utils.user_calls import UserCode, call_user, name_of

if TYPE_CHECKING:
    from collections.abc import Callable


NO_REASON = "unspecified"
"""What stands in the metrics for a verdict without a reason."""


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
    return _verdict(fn, fn(*args, **kwargs), args)


async def acall_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """`call_dynamic_filter` from an event loop: a plain `fn` runs off the loop (see `user_calls`), an async one on it.

    What `fn` raises is raised as it is, with a note that names filter and group.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    with UserCode("dynamic filter", fn, _Argument(args)):
        verdict = await call_user(fn, *args, **kwargs)
    return _verdict(fn, verdict, args)


def _verdict(fn: Callable[..., Any], verdict: Any, args: tuple[Any, ...]) -> DynamicFilterOutput:
    if isinstance(verdict, DynamicFilterOutput):
        return verdict
    if isinstance(verdict, bool) or type(verdict).__name__ in ("bool_", "bool"):  # numpy's bool is not a bool
        return DynamicFilterOutput(keep=bool(verdict))
    raise TypeError(
        f"dynamic filter {name_of(fn)} returned {verdict!r} for {_Argument(args)}: "
        "expected a DynamicFilterOutput or a bool"
    )


class _Argument:
    """Names the group that a filter judged: the second argument, where the caller keeps to the contract."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self._group = args[1] if len(args) > 1 else None

    def __str__(self) -> str:
        first = self._group
        while isinstance(first, list) and first:
            first = first[0]
        return f"group {getattr(first, 'group_index', None)}"


class MetricGatherer:
    """Counts the dropped groups of one rollout by reason. Those without a reason are not counted here: the
    rollouts say `NO_REASON` for them."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        if reason:
            self._drops[reason] += 1

    def collect(self) -> dict[str, int]:
        """{"rollout/dynamic_filter/drop_<reason>": groups}"""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._drops.items()}
