"""trace.json: valid JSON when it is closed, readable when it is not, bounded, and true to what it was told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from miles.utils.trace import GroupPhase, TraceWriter, read_trace

if TYPE_CHECKING:
    from pathlib import Path

ORIGIN = 1_800_000_000.0


def phase(pull: int, start: float = 1.0, end: float = 2.5) -> GroupPhase:
    return GroupPhase(pull, 40 + pull, "in flight", ORIGIN + start, ORIGIN + end, "queued", 12)


def of_kind(events: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] in kinds]


def test_a_closed_file_is_json_and_names_its_lanes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, 100, num_engines=2, origin=ORIGIN)
    trace.close()
    trace.close()
    events = json.loads(path.read_text())
    names = [event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")]
    assert names == [
        *("driver", "engines", "prompt groups"),
        *("wait", "training", "weight update", "eval", "save"),
        *("generation", "engine-0", "engine-1"),
    ]


def test_spans_are_complete_events_in_microseconds(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", 100, num_engines=2, origin=ORIGIN)
    trace.span("training", ORIGIN + 1, ORIGIN + 1.5, 3)
    trace.span("generation", ORIGIN, ORIGIN + 9, 3)
    trace.span("weight_update", ORIGIN + 2, ORIGIN + 2.25, None)
    trace.span("unknown lane", ORIGIN, ORIGIN + 1, None)
    trace.close()
    spans = of_kind(read_trace(tmp_path / "trace.json"), "X")
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in spans] == [
        ("training 4", 1, 2, 1_000_000, 500_000),
        ("generation", 2, 1, 0, 9_000_000),
        ("weight update", 1, 3, 2_000_000, 250_000),
        ("weight update", 2, 2, 2_000_000, 250_000),  # on the lane of each engine, too
        ("weight update", 2, 3, 2_000_000, 250_000),
    ]


def test_a_groups_phase_is_an_asynchronous_slice_of_its_pull(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", 100, origin=ORIGIN)
    trace.groups([phase(7)])
    trace.close()
    begin, end = of_kind(read_trace(tmp_path / "trace.json"), "b", "e")
    assert (begin["ph"], begin["ts"], end["ph"], end["ts"]) == ("b", 1_000_000, "e", 2_500_000)
    assert begin["id"] == end["id"] == 7 and begin["name"] == end["name"] == "in flight"
    assert begin["args"] == {"group": 47, "pull": 7, "then": "queued", "response tokens": 12}


def test_what_a_killed_run_leaves_behind_can_be_read_up_to_its_last_whole_event(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, 100, origin=ORIGIN)
    trace.groups([phase(1), phase(2)])
    text = path.read_text()
    assert len(of_kind(read_trace(path), "b", "e")) == 4
    path.write_text(text[:-10])  # within the last event
    assert len(of_kind(read_trace(path), "b", "e")) == 3
    trace.close()


def test_each_kind_is_bounded_and_the_file_says_where_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, 4, origin=ORIGIN)
    for pull in range(10):
        trace.groups([phase(pull)])
    trace.span("training", ORIGIN, ORIGIN + 1, 0)
    trace.close()
    events = read_trace(path)
    assert len(of_kind(events, "b", "e")) == 4
    assert len(of_kind(events, "X")) == 1
    assert [e["name"] for e in of_kind(events, "i")] == ["--trace-max-events is reached: no more groups"]


def test_zero_events_means_no_file(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", 0, origin=ORIGIN)
    trace.span("training", ORIGIN, ORIGIN + 1, 0)
    trace.groups([phase(0)])
    trace.close()
    assert not (tmp_path / "trace.json").exists()
