"""The timeline of a run as Chrome trace JSON: `<run_dir>/trace.json` opens in https://ui.perfetto.dev.

    driver           waits, training steps, weight updates, evaluations, saves: one lane each
    all engines      when any request was in flight
    prompt groups    each pull of a group: in flight | waits for room | queued | drained, and how it ended
    engine-0, ...    its samples (each attempt at one), weight updates, the pauses in them, and what happened to it:
                     lost, up again, serves again
    router           samples of which it is not known which engine answered, and those of several engines

Which engine answered is known where there is only one, and where engines say so (`meta_info.engine_url`: the embedded
engine does, SGLang does not, and the router tells nobody where it sends a request).

The file is a JSON array of events, written as they come. Viewers do not need its end, so what a killed run leaves
behind opens as well; `read_trace` reads it, too. Times are microseconds since the file was begun. Samples and groups
are nestable asynchronous events (`b`, `n`, `e`), since many of them overlap, with ids that are local to their process,
or viewers would show them apart from it; everything else is complete events (`X`).
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

TRACE_FILE = "trace.json"
DEFAULT_MAX_EVENTS = 200_000

_DRIVER, _ALL_ENGINES, _GROUPS, _FIRST_ENGINE, _ROUTER = 1, 2, 3, 10, 1_000_000
_DRIVER_LANES = {"wait": 1, "training": 2, "weight_update": 3, "eval": 4, "save": 5}
_ENGINE_LANES = {"weight_update": 1, "pause": 2}
_OUTAGE_LANE = 3
_LABELS = {"weight_update": "weight update", "pause": "paused"}
_IN_FLIGHT_LANE = 1

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
    is_last: bool = False


class SampleSpan(NamedTuple):
    """One attempt at a sample, from its first request to its last answer. Times in seconds since the epoch."""

    sample_index: int | None
    group_index: int | None
    start: float
    end: float
    outcome: str
    """The sample's status, or the error that ended the attempt."""

    tokens: int
    engines: tuple[str, ...]
    """URLs of those that have answered, as far as they are known."""

    evaluation: bool = False


class EngineEvent(NamedTuple):
    """Something that has happened to engine number `engine`, at `time` in seconds since the epoch. `text` is a line for
    the console."""

    engine: int
    what: str
    time: float
    text: str


LOST, UP, SERVES = "lost", "up again", "serves again"
"""`EngineEvent.what`: its process or its health is gone; its successor is healthy; that one has current weights."""

_AFTER = {LOST: "starts again", UP: "waits for weights"}


class TraceWriter:
    """Appends to the file, one write for each call. `max_events` bounds the events of groups, those of samples, and
    those of everything else; 0: no file is written. A file that is there is begun anew."""

    def __init__(self, path: Path, max_events: int, *, num_engines: int = 0, origin: float | None = None) -> None:
        self._origin = time.time() if origin is None else origin
        self._num_engines = num_engines
        self._left = {"groups": max_events, "samples": max_events, "spans": max_events}
        self._pids: dict[str, int] = {}  # of engines, by URL
        self._named: set[int] = set()
        self._samples = 0
        self._outages: dict[int, tuple[str, int]] = {}  # engine -> its last event, and when in microseconds
        self._open_groups: dict[int, int] = {}  # pull -> the end of its last phase in microseconds
        self._file = path.open("w", encoding="utf-8") if max_events > 0 else None
        if self._file is not None:
            self._file.write("[\n" + ",\n".join(map(json.dumps, self._names())))
            self._file.flush()

    def learn_engines(self, indexes: Mapping[str, int]) -> None:
        """URL -> number of the engine; a restarted one may have another URL than before."""
        self._pids |= {url: _FIRST_ENGINE + index for url, index in indexes.items()}

    def span(self, lane: str, start: float, end: float, step: int | None) -> None:
        """Something that the driver has seen; seconds since the epoch. Unknown lanes are left out."""
        self._write("spans", self._span(lane, start, end, step))

    def notes(self, notes: Iterable[GroupPhase | SampleSpan]) -> None:
        """What the rollout has seen: phases of one group in their order."""
        notes = list(notes)
        phases = (note for note in notes if isinstance(note, GroupPhase))
        samples = (note for note in notes if isinstance(note, SampleSpan))
        self._write("groups", (event for phase in phases for event in self._phase(phase)))
        self._write("samples", (event for sample in samples for event in self._sample(sample)))

    def engine_events(self, events: Iterable[EngineEvent]) -> None:
        """Those of one engine in their order. Each is a mark, and the time up to it a span."""
        self._write("spans", (made for event in events for made in self._engine_event(event)))

    def close(self) -> None:
        """Twice is fine."""
        if self._file is None:
            return
        for pull, end in self._open_groups.items():
            self._put([{**self._group_event(pull), "ph": "e", "ts": end}])
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
        self._put(chosen)
        self._file.flush()

    def _put(self, events: Iterable[Event]) -> None:
        assert self._file is not None
        self._file.write("".join(",\n" + json.dumps(event) for event in events))

    def _micros(self, seconds: float) -> int:
        return max(0, round((seconds - self._origin) * 1e6))

    # ---- lanes

    def _names(self) -> Iterator[Event]:
        yield from self._name(_DRIVER, "driver", {tid: lane.replace("_", " ") for lane, tid in _DRIVER_LANES.items()})
        yield from self._name(_ALL_ENGINES, "all engines", {_IN_FLIGHT_LANE: "requests in flight"})
        yield from self._name(_GROUPS, "prompt groups", {})
        for i in range(self._num_engines):
            yield from self._name_engine(_FIRST_ENGINE + i, f"engine-{i}")

    def _name_engine(self, pid: int, name: str) -> Iterator[Event]:
        lanes = {tid: _LABELS[lane] for lane, tid in _ENGINE_LANES.items()}
        yield from self._name(pid, name, {**lanes, _OUTAGE_LANE: "outage"})

    def _name(self, pid: int, name: str, lanes: Mapping[int, str]) -> Iterator[Event]:
        self._named.add(pid)
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for tid, lane in lanes.items():
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}

    def _pid_of(self, engines: tuple[str, ...]) -> int:
        if len(engines) > 1:
            return _ROUTER
        if not engines:
            return _FIRST_ENGINE if self._num_engines == 1 else _ROUTER
        if engines[0] not in self._pids:  # one that the driver was not told of, such as an engine of somebody else
            highest = max([_FIRST_ENGINE + self._num_engines - 1, *self._pids.values()])
            self._pids[engines[0]] = highest + 1
        return self._pids[engines[0]]

    # ---- events

    def _span(self, lane: str, start: float, end: float, step: int | None) -> Iterator[Event]:
        name = _LABELS.get(lane, lane)
        event = {
            "ph": "X",
            "name": name if step is None else f"{name} {step + 1}",
            "cat": lane,
            "ts": self._micros(start),
            "dur": max(0, self._micros(end) - self._micros(start)),
        }
        if lane == "generation":
            yield event | {"name": "requests in flight", "pid": _ALL_ENGINES, "tid": _IN_FLIGHT_LANE}
        elif lane in _DRIVER_LANES:
            yield event | {"pid": _DRIVER, "tid": _DRIVER_LANES[lane]}
        if lane in _ENGINE_LANES:
            for i in range(self._num_engines):
                yield event | {"pid": _FIRST_ENGINE + i, "tid": _ENGINE_LANES[lane]}

    def _engine_event(self, e: EngineEvent) -> Iterator[Event]:
        before, since = self._outages.get(e.engine, (SERVES, 0))
        at = max(since, self._micros(e.time))
        lane = {"pid": _FIRST_ENGINE + e.engine, "tid": _OUTAGE_LANE}
        if before in _AFTER:
            yield lane | {"ph": "X", "name": _AFTER[before], "cat": "outage", "ts": since, "dur": at - since}
        yield lane | {"ph": "i", "s": "t", "name": e.what, "ts": at, "args": {"what": e.text}}
        self._outages[e.engine] = (e.what, at)

    def _phase(self, p: GroupPhase) -> Iterator[Event]:
        whole, start, end = self._group_event(p.pull), self._micros(p.start), self._micros(p.end)
        phase = {**whole, "name": p.phase}
        end = max(start, end)
        if p.pull not in self._open_groups:
            yield whole | {"ph": "b", "ts": start, "args": {"group": p.group_index, "pull": p.pull}}
        yield phase | {"ph": "b", "ts": start, "args": {"then": p.outcome, "response tokens": p.tokens}}
        yield phase | {"ph": "e", "ts": end}
        self._open_groups[p.pull] = end
        if p.is_last:
            del self._open_groups[p.pull]
            yield whole | {"name": p.outcome, "ph": "n", "ts": end}
            yield whole | {"ph": "e", "ts": end}

    @staticmethod
    def _group_event(pull: int) -> Event:
        return {"cat": "group", "name": "group", "id2": {"local": f"group-{pull}"}, "pid": _GROUPS, "tid": 0}

    def _sample(self, s: SampleSpan) -> Iterator[Event]:
        pid = self._pid_of(s.engines)
        if pid not in self._named:
            named = pid == _ROUTER
            yield from self._name(pid, "router", {}) if named else self._name_engine(pid, f"engine {s.engines[0]}")
        self._samples += 1
        name = "eval sample" if s.evaluation else "sample"
        event = {"cat": name, "name": name, "id2": {"local": f"sample-{self._samples}"}, "pid": pid, "tid": 0}
        start = self._micros(s.start)
        args = {"sample": s.sample_index, "group": s.group_index, "ended": s.outcome, "response tokens": s.tokens}
        if len(s.engines) > 1:
            args["engines"] = " ".join(s.engines)
        yield event | {"ph": "b", "ts": start, "args": args}
        yield event | {"ph": "e", "ts": max(start, self._micros(s.end))}

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
