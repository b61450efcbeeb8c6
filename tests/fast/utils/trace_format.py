"""The Chrome trace event format, as far as `trace.json` uses it, checked strictly.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format")
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Event = dict[str, Any]

_FIELDS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "ts", "dur", "pid", "tid"},
    "b": {"ph", "name", "cat", "id2", "ts", "pid", "tid"},
    "n": {"ph", "name", "cat", "id2", "ts", "pid", "tid"},
    "e": {"ph", "name", "cat", "id2", "ts", "pid", "tid"},
    "i": {"ph", "name", "s", "ts", "pid", "tid"},
}
_METADATA = {"process_name": ("name", str), "process_sort_index": ("sort_index", int), "thread_name": ("name", str)}


def check_trace(events: list[Event]) -> None:
    """AssertionError with the event that breaks a rule."""
    processes, lanes = _check_metadata([event for event in events if event["ph"] == "M"])
    for event in events:
        _check_fields(event)
        assert event["pid"] in processes, f"unnamed process: {event}"
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in lanes, f"unnamed lane: {event}"
    _check_lanes([event for event in events if event["ph"] == "X"])
    _check_nesting([event for event in events if event["ph"] in "bne"])


def _check_metadata(events: list[Event]) -> tuple[set[int], set[tuple[int, int]]]:
    names: defaultdict[str, list[Any]] = defaultdict(list)
    for event in events:
        key, kind = _METADATA[event["name"]]
        assert isinstance(event["args"][key], kind) and event["args"].keys() == {key}, event
        names[event["name"]].append((event["pid"], event["tid"]))
    for kind, places in names.items():
        assert len(set(places)) == len(places), f"{kind} is given twice: {places}"
    return {pid for pid, _ in names["process_name"]}, set(names["thread_name"])


def _check_fields(event: Event) -> None:
    phase = event["ph"]
    assert phase in _FIELDS, f"unknown phase: {event}"
    assert _FIELDS[phase] <= event.keys() <= _FIELDS[phase] | {"args"}, event
    assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str), event
    for number in ("ts", "dur"):
        assert number not in event or (isinstance(event[number], int) and event[number] >= 0), event
    assert "id2" not in event or (event["id2"].keys() == {"local"} and isinstance(event["id2"]["local"], str)), event
    assert event.get("s", "g") in ("g", "p", "t"), event


def _check_lanes(events: list[Event]) -> None:
    """Complete events of one lane come in order and do not overlap."""
    end: dict[tuple[int, int], int] = {}
    for event in events:
        lane = (event["pid"], event["tid"])
        assert event["ts"] >= end.get(lane, 0), f"begins before the last one of its lane has ended: {event}"
        end[lane] = event["ts"] + event["dur"]


def _check_nesting(events: list[Event]) -> None:
    """Events of one id are in order, and each `e` ends the `b` that was begun last and has not ended."""
    stacks: defaultdict[tuple[int, str, str], list[str]] = defaultdict(list)
    last: dict[tuple[int, str, str], int] = {}
    for event in events:
        track = (event["pid"], event["cat"], event["id2"]["local"])
        assert event["ts"] >= last.get(track, 0), f"goes back in time: {event}"
        last[track] = event["ts"]
        if event["ph"] == "b":
            stacks[track].append(event["name"])
            continue
        assert stacks[track], f"nothing is open: {event}"
        if event["ph"] == "e":
            begun = stacks[track].pop()
            assert begun == event["name"], f"ends {begun!r}: {event}"
    left = {track: stack for track, stack in stacks.items() if stack}
    assert not left, f"never ended: {left}"
