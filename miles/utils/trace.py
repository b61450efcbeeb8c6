"""The timeline of a run as Chrome trace JSON: `<run_dir>/trace.json` opens in https://ui.perfetto.dev.

    driver    waits, training steps, weight updates, evaluations, saves        one lane each
    engines   generation (of all of them together), each engine's weight updates
    groups    each pull of a prompt group: in flight | waits for room | queued | with the trainer -> how it ended

The file is a JSON array of events, written as they come. Viewers do not need its end, so what a killed run leaves
behind opens as well; `read_trace` reads it, too. Times are microseconds since the file was begun.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

TRACE_FILE = "trace.json"
DEFAULT_MAX_EVENTS = 200_000

_DRIVER, _ENGINES, _GROUPS = 1, 2, 3
_PROCESSES = {_DRIVER: "driver", _ENGINES: "engines", _GROUPS: "prompt groups"}
_DRIVER_LANES = {"wait": 1, "training": 2, "weight_update": 3, "eval": 4, "save": 5}
_GENERATION_LANE = 1
_FIRST_ENGINE_LANE = 2

Event = dict[str, Any]


class GroupPhase(NamedTuple):
    """A stretch in the life of one pull of a prompt group, with one owner. Times in seconds since the epoch."""

    pull: int
    group_index: int | None
    phase: str
    start: float
    end: float
    outcome: str
    """Who had it next, or how it ended: `queued`, `trained`, `recycled: stale`."""

    tokens: int


class TraceWriter:
    """Appends to the file, one write for each call. `max_events` bounds the events of groups, and those of everything
    else as well; 0: no file is written. A file that is there is begun anew."""

    def __init__(self, path: Path, max_events: int, *, num_engines: int = 0, origin: float | None = None) -> None:
        self._origin = time.time() if origin is None else origin
        self._num_engines = num_engines
        self._left = {"groups": max_events, "spans": max_events}
        self._file = path.open("w", encoding="utf-8") if max_events > 0 else None
        if self._file is not None:
            self._file.write("[\n" + ",\n".join(map(json.dumps, self._names())))
            self._file.flush()

    def span(self, lane: str, start: float, end: float, step: int | None) -> None:
        """Something that the driver has seen; seconds since the epoch. Unknown lanes are left out."""
        self._write("spans", self._span(lane, start, end, step))

    def groups(self, phases: Iterable[GroupPhase]) -> None:
        self._write("groups", (event for phase in phases for event in self._phase(phase)))

    def close(self) -> None:
        """Twice is fine."""
        if self._file is not None:
            self._file.write("\n]\n")
            self._file.close()
            self._file = None

    def _write(self, kind: str, events: Iterable[Event]) -> None:
        if self._file is None or self._left[kind] <= 0:
            return
        chosen = list(events)
        self._left[kind] -= len(chosen)
        if self._left[kind] <= 0:
            chosen.append(self._full(kind))
        self._file.write("".join(",\n" + json.dumps(event) for event in chosen))
        self._file.flush()

    def _micros(self, seconds: float) -> int:
        return round((seconds - self._origin) * 1e6)

    def _names(self) -> Iterator[Event]:
        for pid, name in _PROCESSES.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        lanes = [(_DRIVER, tid, lane.replace("_", " ")) for lane, tid in _DRIVER_LANES.items()]
        lanes.append((_ENGINES, _GENERATION_LANE, "generation"))
        lanes += [(_ENGINES, _FIRST_ENGINE_LANE + i, f"engine-{i}") for i in range(self._num_engines)]
        for pid, tid, name in lanes:
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}

    def _span(self, lane: str, start: float, end: float, step: int | None) -> Iterator[Event]:
        name = lane.replace("_", " ")
        event = {
            "ph": "X",
            "name": name if step is None else f"{name} {step + 1}",
            "cat": lane,
            "ts": self._micros(start),
            "dur": max(0, self._micros(end) - self._micros(start)),
        }
        if lane == "generation":
            yield event | {"name": name, "pid": _ENGINES, "tid": _GENERATION_LANE}
        elif lane in _DRIVER_LANES:
            yield event | {"pid": _DRIVER, "tid": _DRIVER_LANES[lane]}
        if lane == "weight_update":
            for i in range(self._num_engines):
                yield event | {"pid": _ENGINES, "tid": _FIRST_ENGINE_LANE + i}

    def _phase(self, p: GroupPhase) -> Iterator[Event]:
        event = {"cat": "group", "name": p.phase, "id": p.pull, "pid": _GROUPS, "tid": 0}
        args = {"group": p.group_index, "pull": p.pull, "then": p.outcome, "response tokens": p.tokens}
        yield event | {"ph": "b", "ts": self._micros(p.start), "args": args}
        yield event | {"ph": "e", "ts": self._micros(p.end)}

    def _full(self, kind: str) -> Event:
        return {
            "ph": "i",
            "s": "g",
            "name": f"--trace-max-events is reached: no more {kind}",
            "ts": self._micros(time.time()),
            "pid": _DRIVER,
            "tid": 0,
        }


def read_trace(path: Path) -> list[Event]:
    """The events of a trace; of one that was cut off, those that are whole."""
    text = path.read_text(encoding="utf-8")
    try:
        return list(json.loads(text))
    except json.JSONDecodeError:
        whole = text if text.endswith("}") else text.rpartition(",\n")[0]
        return list(json.loads(whole + "]"))
