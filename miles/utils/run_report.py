"""What a run was like, from the files in its directory.

<run_dir>/metrics.jsonl   one object a step       --+
<run_dir>/timeline.jsonl  what was busy when      --+--> summary.json, report.png

python -m miles.utils.run_report RUN_DIR          makes both again, also while the run goes on
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.utils import intervals
from miles.utils.bottleneck import combined, diagnose
from miles.utils.console import duration, eval_scores, print_error, print_summary
from miles.utils.file_errors import named_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from miles.utils.intervals import Interval

METRICS_FILE = "metrics.jsonl"
TIMELINE_FILE = "timeline.jsonl"
SUMMARY_FILE = "summary.json"
PICTURE_FILE = "report.png"

REWARD_STEPS = 10
"""The reward at the start and at the end is the mean of this many steps."""

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Lanes = dict[str, list["Interval"]]

_DROPPED = re.compile(r"^rollout/dynamic_filter/drop_(.+)$")
_PREFIX = "rollout/fully_async/"
_RECYCLED = re.compile(r"^rollout/fully_async/(\w+)_groups_recycled$")
_WASTED = re.compile(r"^rollout/fully_async/tokens_wasted_(\w+)$")


def write_report(run_dir: str | Path) -> dict[str, Any]:
    """Write `summary.json` and `report.png`; return the summary.

    Raises ValueError where the directory holds no metrics.
    """
    run_dir = Path(run_dir)
    rows = read_metrics(run_dir)
    lanes = read_timeline(run_dir)
    summary = summarize(rows, lanes) | {"run_dir": str(run_dir)}
    with named_errors(run_dir / SUMMARY_FILE):
        (run_dir / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    # Without a home directory it says twice where its cache is instead, which is no news of the run.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from miles.utils.run_picture import draw_report  # here, since matplotlib takes a second to import

    with named_errors(run_dir / PICTURE_FILE):
        draw_report(rows, lanes, run_dir / PICTURE_FILE, title=str(run_dir))
    return summary


def report_of_stopped_run(run_dir: str | Path) -> str:
    """Write the report of a run that ended early, as far as it got; a line for the message that tells of its end.

    Empty where no step was finished. A report that cannot be made does not hide why the run ended.
    """
    try:
        write_report(run_dir)
    except (ValueError, OSError) as error:  # no step yet, or a full disk: that the run ended is the message
        logger.info("no report: %s", error)
        return ""
    return f"\n    what it did until then: {Path(run_dir) / PICTURE_FILE}, {SUMMARY_FILE} beside it"


# -- reading


def read_metrics(run_dir: Path) -> list[Row]:
    """Every record of `metrics.jsonl`. Raises ValueError where there is none."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{run_dir} is not a run directory: it has no {METRICS_FILE}")
    rows = read_json_lines(path)
    if not rows:
        raise ValueError(f"{path} is empty: the run ended before its first step")
    return rows


def read_timeline(run_dir: Path) -> Lanes:
    """Intervals by lane, in seconds since the epoch. Empty without a timeline."""
    path = run_dir / TIMELINE_FILE
    lanes: defaultdict[str, list[Interval]] = defaultdict(list)
    for entry in read_json_lines(path) if path.is_file() else []:
        lanes[entry["lane"]].append((entry["start"], entry["end"]))
    return dict(lanes)


def read_json_lines(path: Path) -> list[Row]:
    """A last line that was cut off, as by kill -9, is left out; any other bad line is a ValueError with its number."""
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    return rows


# -- summarising (pure)


def summarize(rows: Sequence[Row], lanes: Lanes) -> dict[str, Any]:
    """The numbers of the end-of-run summary; times in seconds, shares between 0 and 1, None where unknown."""
    steps = training_rows(rows)
    return {
        "steps": len(steps),
        "reward": reward_summary(steps),
        "eval": eval_summary(rows),
        "time": time_summary(steps, lanes),
        "staleness": staleness_summary(steps),
        "groups": group_summary(steps),
        "tokens": token_summary(steps),
        "idle": idle_summary(steps),
        "engine_restarts": int(sum(column(steps, "rollout/engine_restarts"))),
        "bottleneck": bottleneck_summary(steps),
        "logprob_abs_diff_max": max(column(steps, "train/train_rollout_logprob_abs_diff"), default=None),
    }


def training_rows(rows: Iterable[Row]) -> list[Row]:
    """The records that belong to training steps: an evaluation before the first step is none."""
    return [row for row in rows if any(key.startswith(("rollout/", "train/")) for key in row)]


def column(rows: Iterable[Row], key: str) -> list[float]:
    """The values of `key`, leaving out records that lack it or hold null."""
    return [row[key] for row in rows if row.get(key) is not None]


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def reward_summary(steps: Sequence[Row]) -> dict[str, Any]:
    """Means at both ends, of 10 steps each; of a half each where the run has fewer than 20."""
    rewards = column(steps, "rollout/raw_reward")
    window = max(1, min(REWARD_STEPS, len(rewards) // 2))
    return {"first": mean(rewards[:window]), "last": mean(rewards[-window:]), "mean_of_steps": window}


def eval_summary(rows: Iterable[Row]) -> dict[str, dict[str, float | None]]:
    """For each data set its first and its last evaluation. With one alone, it came before or after the first step.

    One that ran beside training is found late among the records: what counts is how far its weights were trained.
    """
    results: dict[str, dict[str, float | None]] = {}
    for row in sorted(rows, key=steps_trained):
        for name, score in eval_scores(row).items():
            entry = results.setdefault(name, {"before": None, "after": None})
            if steps_trained(row):
                entry["after"] = score
            elif entry["before"] is None:
                entry["before"] = score
    return results


def steps_trained(row: Row) -> float:
    """The training steps that the weights of a record's evaluation have had."""
    said = row.get("eval/steps_trained")
    return said if said is not None else row["step"] + (1 if training_rows([row]) else 0)


def time_summary(steps: Sequence[Row], lanes: Lanes) -> dict[str, Any]:
    """How long each part was active over the training loop, and how much of it at once.

    Generation is active while a request is in flight and the engines are not paused by a weight update. The loop lasts
    from the first wait for a batch to the end of the last step; start-up, shutdown and evaluations
    outside it do not count.
    """
    window = loop_window(lanes)
    lanes = {**lanes, "generation": generating(lanes)}
    inside = {lane: intervals.intersection(spans, [window]) for lane, spans in lanes.items()} if window else {}
    generation, training = inside.get("generation", []), inside.get("training", [])
    loop_seconds = window[1] - window[0] if window else None
    training_seconds = intervals.total(training)
    overlap = intervals.overlap(generation, training)
    waited = intervals.total(inside.get("wait", []))
    return {
        "loop": loop_seconds,
        "step_mean": mean(column(steps, "perf/step_time")),
        "generation": intervals.total(generation),
        "training": training_seconds,
        "overlap": overlap,
        "overlap_share_of_training": overlap / training_seconds if training_seconds else None,
        "weight_update": intervals.total(inside.get("weight_update", [])),
        "eval": intervals.total(lanes.get("eval", [])),
        "trainer_waited": waited,
        "trainer_waited_share": waited / loop_seconds if loop_seconds else None,
    }


def generating(lanes: Lanes) -> list[Interval]:
    """When engines wrote tokens: requests were in flight, and no weight update had paused the engines."""
    return intervals.difference(lanes.get("generation", []), lanes.get("pause", []))


def loop_window(lanes: Lanes) -> Interval | None:
    spans = lanes.get("wait", []) + lanes.get("training", [])
    if not spans:
        return None
    start = min(start for start, _ in spans)
    ends = [end for lane in ("wait", "training", "weight_update") for _, end in lanes.get(lane, [])]
    return start, max(ends)


def staleness_summary(steps: Sequence[Row]) -> dict[str, float | None]:
    """Of the groups that were trained on, in weight versions. Each group counts alike."""
    prefix = "rollout/fully_async/trained_"
    measured = [row for row in steps if row.get(prefix + "avg_staleness") is not None]
    weights = [row.get("rollout/num_groups", 1) for row in measured]
    weighted = sum(w * row[prefix + "avg_staleness"] for w, row in zip(weights, measured, strict=True))
    return {
        "mean": weighted / sum(weights) if sum(weights) else None,
        "max": max(column(steps, prefix + "max_staleness"), default=None),
    }


def group_summary(steps: Sequence[Row]) -> dict[str, Any]:
    """How many groups were trained on, and how many were not, by reason."""
    return {
        "trained": int(sum(column(steps, "rollout/num_groups"))),
        "recycled": sums_by_reason(steps, _RECYCLED),
        "dropped": sums_by_reason(steps, _DROPPED),
        "trimmed_samples": int(sum(column(steps, "rollout/trimmed_samples"))),
    }


def token_summary(steps: Sequence[Row]) -> dict[str, Any]:
    """Response tokens that were generated and trained on, and those thrown away, by reason."""
    return {
        "generated": int(sum(column(steps, f"{_PREFIX}tokens_generated"))),
        "trained": int(sum(column(steps, f"{_PREFIX}tokens_trained"))),
        "wasted": sums_by_reason(steps, _WASTED),
    }


def idle_summary(steps: Sequence[Row]) -> dict[str, float | None]:
    """The shares of the steps' time in which either side was idle; None unless fully async. Long steps weigh more."""
    whole = combined(steps)
    return {side: whole.get(f"{_PREFIX}{side}_idle_fraction") for side in ("generation", "train")}


def bottleneck_summary(steps: Sequence[Row]) -> str | None:
    """The sentence about the whole run; None unless fully async. Its first step, in which everything starts, does not
    count, nor does the evaluation after its last one, which nothing waits for."""
    counted = list(steps[1:] if len(steps) > 1 else steps)
    if counted:
        counted[-1] = _without_evaluation(counted[-1])
    diagnosis = diagnose(combined(counted))
    return None if diagnosis is None else diagnosis.sentence


def _without_evaluation(step: Row) -> Row:
    """The metrics of a step as if it had ended before its evaluation, during which the trainer was idle."""
    seconds, evaluation = step.get("perf/step_time") or 0.0, step.get("perf/eval_time") or 0.0
    left = seconds - evaluation
    if not evaluation or left <= 0:
        return step
    idle = f"{_PREFIX}train_idle_fraction"
    idle_seconds = max(0.0, (step.get(idle) or 0.0) * seconds - evaluation)
    return {**step, "perf/step_time": left, "perf/eval_time": 0.0, idle: min(1.0, idle_seconds / left)}


def sums_by_reason(steps: Iterable[Row], pattern: re.Pattern[str]) -> dict[str, int]:
    """Totals over the run of every key that matches, by the key's group 1; reasons that never occurred are left out."""
    sums: defaultdict[str, float] = defaultdict(float)
    for row in steps:
        for key, value in row.items():
            match = pattern.match(key)
            if match and value:
                sums[match.group(1)] += value
    return {reason: int(count) for reason, count in sorted(sums.items())}


# -- showing


def format_summary(summary: dict[str, Any]) -> str:
    """The summary as a short table for the console."""
    reward, times, staleness = summary["reward"], summary["time"], summary["staleness"]
    steps = reward["mean_of_steps"]
    span = f"first and last {steps} steps" if steps > 1 else "first and last step"
    lines = [
        ("steps", f"{summary['steps']} in {_seconds(times['loop'])}, {_seconds(times['step_mean'], 3)} each"),
        ("reward", f"{_number(reward['first'])} -> {_number(reward['last'])}  ({span})"),
    ]
    for name, scores in summary["eval"].items():
        lines.append((f"eval {name}", f"{_number(scores['before'])} -> {_number(scores['after'])}  (before and after)"))
    share = times["overlap_share_of_training"]
    lines += [
        ("generation", f"{_seconds(times['generation'])} active"),
        ("training", f"{_seconds(times['training'])}, {_percent(share)} of it while generation went on"),
        ("weight updates", _seconds(times["weight_update"])),
        (
            "trainer waited",
            f"{_seconds(times['trainer_waited'])}, {_percent(times['trainer_waited_share'])} of the time",
        ),
    ]
    if staleness["mean"] is not None:
        lines.append(
            ("staleness", f"mean {staleness['mean']:.2f}, max {staleness['max']:.0f} weight versions (trained groups)")
        )
    lines.append(("groups", _groups_text(summary["groups"])))
    if summary["tokens"]["generated"]:
        lines.append(("tokens", _tokens_text(summary["tokens"])))
    if summary["engine_restarts"]:
        lines.append(("engines", f"{summary['engine_restarts']} started again (rollout/engine_restarts)"))
    if summary.get("bottleneck"):
        lines.append(("bottleneck", summary["bottleneck"]))
    if summary.get("run_dir"):
        lines.append(("files", f"{summary['run_dir']}/  ({PICTURE_FILE}, {METRICS_FILE}, logs/, ...)"))
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"  {label:<{width}}  {text}" for label, text in lines)


def _groups_text(groups: dict[str, Any]) -> str:
    parts = [f"{groups['trained']} trained"]
    for kind in ("recycled", "dropped"):
        reasons = groups[kind]
        detail = f" ({', '.join(f'{reason} {count}' for reason, count in reasons.items())})" if reasons else ""
        parts.append(f"{sum(reasons.values())} {kind}{detail}")
    if groups["trimmed_samples"]:
        parts.append(f"{groups['trimmed_samples']} samples trimmed")
    return ", ".join(parts)


def _tokens_text(tokens: dict[str, Any]) -> str:
    wasted = sum(tokens["wasted"].values())
    detail = ", ".join(f"{reason} {count}" for reason, count in tokens["wasted"].items())
    text = f"{tokens['generated']} generated, {tokens['trained']} trained, {wasted} thrown away"
    return text + (f" ({detail})" if detail else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _seconds(value: float | None, digits: int = 1) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f} s" if value < 600 else duration(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m miles.utils.run_report", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", help="directory of one run, such as runs/quickstart/20260101-120000")
    options = parser.parse_args(argv)
    try:
        summary = write_report(options.run_dir)
    except ValueError as error:
        print_error(str(error))
        return 1
    print_summary(format_summary(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
