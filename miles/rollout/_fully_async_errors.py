"""How a fully-async rollout ends other than by `close()` or by an error of somebody else."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from miles.rollout._fully_async_groups import describe, samples_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miles.rollout._fully_async_ledger import GroupKey

_LISTED = 20


class NoProgress(RuntimeError):
    """For `--no-progress-timeout` seconds no group was finished, no sample of an evaluation, or a filter has not
    returned."""


class NothingGetsThrough(RuntimeError):
    """`--max-empty-batches` batches' worth of groups were turned down in a row."""


def no_progress(waited: float, stuck: Sequence[GroupKey], now: float, engines: Sequence[str]) -> NoProgress:
    """The error that lists the groups in flight, oldest first: index, age, state, and the engine.

    `engines`: those behind the router, none where it does not say. A request is at one of them, and the router does not
    tell at which: only where there is one it is known, or where a generate function has put `engine` on its sample.
    """
    lines = [f"no finished group for {waited:.0f} s, the limit of --no-progress-timeout; in flight:"]
    anywhere = engines[0] if len(engines) == 1 else f"one of {len(engines)}" if engines else "not known"
    lines += [f"  {_describe_stuck(key, now, anywhere)}" for key in stuck[:_LISTED]]
    lines += [f"  and {len(stuck) - _LISTED} more"] if len(stuck) > _LISTED else []
    lines += ["  nothing"] if not stuck else []
    lines += [f"engines behind the router: {', '.join(engines)}"] if len(engines) > 1 else []
    return NoProgress("\n".join(lines))


def took_too_long(what: str, seconds: float) -> NoProgress:
    return NoProgress(
        f"{what} has not returned for {seconds:g} s, the limit of --no-progress-timeout; plain reward and filter "
        "functions run one at a time, so that another one may hold it up"
    )


def describe_oldest(in_flight: Sequence[GroupKey], now: float) -> str:
    """`, the oldest for 40 s: group 1 (samples 2..3)`; nothing where nothing is in flight."""
    if not in_flight:
        return ""
    return f", the oldest for {now - in_flight[0].pulled_at:.0f} s: {describe(in_flight[0].prompt_group)}"


def nothing_gets_through(batches: int, turned_down: Mapping[str, int]) -> NothingGetsThrough:
    return NothingGetsThrough(
        f"{sum(turned_down.values())} finished groups in a row were turned down and none was kept, the limit of "
        f"--max-empty-batches {batches}: {describe_counts(turned_down)}"
    )


def describe_counts(counts: Mapping[str, int]) -> str:
    """`8 filtered, 4 aborted`: the most frequent first."""
    return ", ".join(f"{count} {word}" for word, count in sorted(counts.items(), key=lambda item: -item[1]))


def _describe_stuck(key: GroupKey, now: float, anywhere: str) -> str:
    samples = samples_of(key.prompt_group)
    states = Counter(sample.status.value for sample in samples)
    engines = sorted({str(engine) for sample in samples if (engine := getattr(sample, "engine", None)) is not None})
    state = "finished, waiting for room in the queue" if key.group is not None else "in generation"
    return (
        f"{describe(key.prompt_group)}: {now - key.pulled_at:.0f} s old, {state}, "
        f"samples {', '.join(f'{count} {status}' for status, count in states.items())}, "
        f"{key.slots} of {len(samples)} places held, engine {', '.join(engines) or anywhere}"
    )
