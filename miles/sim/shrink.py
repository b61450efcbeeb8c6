"""From a schedule that fails to the smallest one that still fails, found by Hypothesis.

A schedule is made smaller by leaving faults out, by giving fields their simplest value, and by fewer steps. Answers
keep their lengths meanwhile, because random numbers belong to samples (see `miles.sim.noise`).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from miles.sim.schedule import Schedule
from miles.sim.simulation import SimulationFailed, simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

_KEEP_OUT_OF = 12  # a part is left out with this probability's inverse, so that most draws still fail


def minimal(failed: SimulationFailed, run: Callable[[Schedule], Any] = simulate, tries: int = 150) -> SimulationFailed:
    """The failure of the smallest schedule that fails in the same way; the given one where there is none smaller."""
    import hypothesis
    from hypothesis.errors import NoSuchExample

    kind = type(failed.error)
    smallest = failed

    def fails(schedule: Schedule) -> bool:
        nonlocal smallest
        try:
            run(schedule)
        except SimulationFailed as error:
            if type(error.error) is not kind:
                return False
            smallest = error
            return True
        return False

    settings = hypothesis.settings(
        max_examples=tries,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        found = hypothesis.find(_smaller(failed.schedule), fails, settings=settings)
    except NoSuchExample:
        return failed
    fails(found)  # the last failure seen need not be the smallest
    return smallest


def _smaller(schedule: Schedule) -> SearchStrategy[Schedule]:
    from hypothesis import strategies as st

    simplest = Schedule()
    names = [f.name for f in fields(Schedule) if f.name not in ("seed", "faults", "steps")]

    @st.composite
    def draw_smaller(draw: Callable[[Any], Any]) -> Schedule:
        def kept() -> bool:
            return bool(draw(st.integers(0, _KEEP_OUT_OF)) > 0)

        faults = tuple(fault for fault in schedule.faults if kept())
        simpler = {name: getattr(simplest, name) for name in names if not kept()}
        steps = schedule.steps - draw(st.integers(0, schedule.steps - 1)) if not kept() else schedule.steps
        return replace(schedule, faults=faults, steps=steps, **simpler)

    return draw_smaller()
