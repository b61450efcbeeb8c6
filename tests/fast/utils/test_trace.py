"""trace.json: valid in every way that the format asks for, readable when it is cut off, bounded, and true."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from miles.utils.trace import EngineEvent, GroupPhase, SampleSpan, TraceWriter, read_trace
from tests.fast.utils.trace_format import check_trace

if TYPE_CHECKING:
    from pathlib import Path

ORIGIN = 1_800_000_000.0
URL = "http://10.0.0.7:31000"


def phase(
    pull: int,
    start: float = 1.0,
    end: float = 2.5,
    name: str = "in flight",
    outcome: str = "queued",
    is_last: bool = False,
) -> GroupPhase:
    return GroupPhase(pull, 40 + pull, name, ORIGIN + start, ORIGIN + end, outcome, 12, is_last)


def sample(
    index: int, *engines: str, start: float = 1.0, end: float = 2.5, outcome: str = "completed", **keywords: Any
) -> SampleSpan:
    return SampleSpan(index, index // 2, ORIGIN + start, ORIGIN + end, outcome, 7, engines, **keywords)


def of_kind(events: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] in kinds]


def processes(events: list[dict[str, Any]]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def written(path: Path) -> list[dict[str, Any]]:
    events = read_trace(path)
    check_trace(events)
    return events


def test_a_closed_file_is_json_and_names_its_lanes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, 100, num_engines=2, origin=ORIGIN)
    trace.close()
    trace.close()
    events = json.loads(path.read_text())
    check_trace(events)
    assert list(processes(events).values()) == ["driver", "all engines", "prompt groups", "engine-0", "engine-1"]
    lanes = [(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"]
    assert lanes == [
        *((1, lane) for lane in ("wait", "training", "weight update", "eval", "save")),
        (2, "requests in flight"),
        *((10, lane) for lane in ("weight update", "paused", "outage")),
        *((11, lane) for lane in ("weight update", "paused", "outage")),
    ]


def test_spans_are_complete_events_in_microseconds(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", 100, num_engines=2, origin=ORIGIN)
    trace.span("training", ORIGIN + 1, ORIGIN + 1.5, 3)
    trace.span("generation", ORIGIN, ORIGIN + 9, 3)
    trace.span("pause", ORIGIN + 2.1, ORIGIN + 2.2, None)
    trace.span("weight_update", ORIGIN + 2, ORIGIN + 2.25, None)
    trace.span("unknown lane", ORIGIN, ORIGIN + 1, None)
    trace.close()
    spans = of_kind(written(tmp_path / "trace.json"), "X")
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in spans] == [
        ("training 4", 1, 2, 1_000_000, 500_000),
        ("requests in flight", 2, 1, 0, 9_000_000),
        ("paused", 10, 2, 2_100_000, 100_000),
        ("paused", 11, 2, 2_100_000, 100_000),
        ("weight update", 1, 3, 2_000_000, 250_000),
        ("weight update", 10, 1, 2_000_000, 250_000),  # on the lane of each engine, too
        ("weight update", 11, 1, 2_000_000, 250_000),
    ]


def test_an_engine_that_is_lost_shows_until_it_serves_again(tmp_path: Path) -> None:
    def happened(what: str, seconds: float) -> EngineEvent:
        return EngineEvent(1, what, ORIGIN + seconds, f"engine-1: {what}")

    trace = TraceWriter(tmp_path / "trace.json", 100, num_engines=2, origin=ORIGIN)
    trace.engine_events([happened("lost", 1.0), happened("lost", 3.0)])  # its first successor has died as well
    trace.engine_events([happened("up again", 5.0), happened("serves again", 4.5)])  # somebody has set the clock back
    trace.engine_events([happened("lost", 9.0)])
    trace.close()
    events = of_kind(written(tmp_path / "trace.json"), "X", "i")
    assert {(event["pid"], event["tid"]) for event in events} == {(11, 3)}
    assert [(e["name"], e["ts"], e.get("dur")) for e in events] == [
        ("lost", 1_000_000, None),
        ("starts again", 1_000_000, 2_000_000),
        ("lost", 3_000_000, None),
        ("starts again", 3_000_000, 2_000_000),
        ("up again", 5_000_000, None),
        ("waits for weights", 5_000_000, 0),
        ("serves again", 5_000_000, None),
        ("lost", 9_000_000, None),
    ]
    assert events[0]["args"] == {"what": "engine-1: lost"}


def test_a_group_is_an_asynchronous_slice_with_its_phases_inside(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", 100, origin=ORIGIN)
    trace.notes([phase(7), phase(7, 2.5, 3.0, "queued", "drained")])
    trace.notes([phase(7, 3.0, 4.0, "drained", "trained", is_last=True)])
    trace.close()
    events = of_kind(written(tmp_path / "trace.json"), "b", "n", "e")
    assert {event["id2"]["local"] for event in events} == {"group-7"}
    assert [(e["ph"], e["name"], e["ts"]) for e in events] == [
        ("b", "group", 1_000_000),
        ("b", "in flight", 1_000_000),
        ("e", "in flight", 2_500_000),
        ("b", "queued", 2_500_000),
        ("e", "queued", 3_000_000),
        ("b", "drained", 3_000_000),
        ("e", "drained", 4_000_000),
        ("n", "trained", 4_000_000),
        ("e", "group", 4_000_000),
    ]
    assert events[0]["args"] == {"group": 47, "pull": 7}
    assert events[1]["args"] == {"then": "queued", "response tokens": 12}


def test_a_group_whose_end_is_never_told_ends_with_the_file(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", 3, origin=ORIGIN)
    trace.notes([phase(1)])
    trace.notes([phase(1, 2.5, 3.0, "queued", "drained")])  # past the limit
    trace.close()
    events = of_kind(written(tmp_path / "trace.json"), "b", "e")
    assert [(e["ph"], e["name"], e["ts"]) for e in events][-1] == ("e", "group", 2_500_000)


@pytest.mark.parametrize(
    ("num_engines", "engines", "process"),
    [
        (1, (), "engine-0"),  # there is no other
        (2, (), "router"),
        (2, (URL,), "engine-1"),
        (2, ("http://elsewhere:1",), "engine http://elsewhere:1"),
        (2, (URL, "http://elsewhere:1"), "router"),
        (0, (), "router"),
    ],
)
def test_a_sample_is_on_its_engine_or_where_that_is_not_known_on_the_router(
    tmp_path: Path, num_engines: int, engines: tuple[str, ...], process: str
) -> None:
    trace = TraceWriter(tmp_path / "trace.json", 100, num_engines=num_engines, origin=ORIGIN)
    trace.learn_engines({URL: 1} if num_engines == 2 else {})
    trace.notes([sample(5, *engines), sample(6, *engines)])
    trace.close()
    events = written(tmp_path / "trace.json")
    begin, end, *_ = of_kind(events, "b", "e")
    assert processes(events)[begin["pid"]] == process
    assert (begin["ts"], end["ts"], begin["name"]) == (1_000_000, 2_500_000, "sample")
    several = {"engines": " ".join(engines)} if len(engines) > 1 else {}
    assert begin["args"] == {"sample": 5, "group": 2, "ended": "completed", "response tokens": 7, **several}


def test_an_engine_that_comes_back_elsewhere_keeps_its_lane(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", 100, num_engines=2, origin=ORIGIN)
    for url in (URL, "http://10.0.0.7:31777"):
        trace.learn_engines({url: 1})
        trace.notes([sample(0, url)])
    trace.close()
    assert {event["pid"] for event in of_kind(written(tmp_path / "trace.json"), "b")} == {11}


def test_samples_of_an_evaluation_are_told_apart(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", 100, num_engines=1, origin=ORIGIN)
    trace.notes([sample(0, evaluation=True)])
    trace.close()
    assert {event["name"] for event in of_kind(written(tmp_path / "trace.json"), "b", "e")} == {"eval sample"}


def test_a_span_that_ends_before_it_begins_has_no_length(tmp_path: Path) -> None:
    """The clock of the wall may be set back."""
    trace = TraceWriter(tmp_path / "trace.json", 100, num_engines=1, origin=ORIGIN)
    trace.span("training", ORIGIN + 2, ORIGIN + 1, 0)
    trace.notes([phase(0, 2.0, 1.0), sample(0, start=2.0, end=1.0)])
    trace.close()
    written(tmp_path / "trace.json")


def test_what_a_killed_run_leaves_behind_can_be_read_up_to_its_last_whole_event(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, 100, origin=ORIGIN)
    trace.notes([phase(1), phase(2)])
    text = path.read_text()
    assert len(of_kind(read_trace(path), "b", "e")) == 6
    path.write_text(text[:-10])  # within the last event
    assert len(of_kind(read_trace(path), "b", "e")) == 5
    trace.close()


def test_each_kind_is_bounded_and_the_file_says_where_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, 4, num_engines=1, origin=ORIGIN)
    for pull in range(10):
        trace.notes([phase(pull, is_last=True), sample(pull)])
    trace.span("training", ORIGIN, ORIGIN + 1, 0)
    trace.close()
    events = written(path)
    assert [e["name"] for e in of_kind(events, "b")] == ["group", "in flight", "sample", "sample"]
    assert len(of_kind(events, "X")) == 1
    assert [e["name"] for e in of_kind(events, "i")] == [
        f"--trace-max-events is reached: no more {kind}" for kind in ("groups", "samples")
    ]


def test_zero_events_means_no_file(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", 0, origin=ORIGIN)
    trace.span("training", ORIGIN, ORIGIN + 1, 0)
    trace.notes([phase(0), sample(0)])
    trace.close()
    assert not (tmp_path / "trace.json").exists()
