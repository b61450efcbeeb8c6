"""The picture of a run: reward, staleness, queue, step time, and generation against training on one time axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from miles.utils import intervals
from miles.utils.console import eval_scores
from miles.utils.run_report import loop_window, steps_trained, training_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from miles.utils.intervals import Interval
    from miles.utils.run_report import Lanes, Row

LANES = {
    "generation": ("generation", "#3b76af"),
    "training": ("training", "#e0812f"),
    "weight_update": ("weight update", "#529d4e"),
    "wait": ("trainer waits", "#b8b8b8"),
    "eval": ("evaluation", "#8d6ab8"),
}
"""Lane of timeline.jsonl -> its label and colour, from top to bottom."""

ZOOM_STEPS = 12
"""The detailed timeline shows about so many training steps from the middle of the run."""

SMOOTHING = 10
"""Steps in the running mean of the reward."""


def draw_report(rows: Sequence[Row], lanes: Lanes, path: Path, *, title: str) -> None:
    """Write the picture as PNG. Panels without data say so. Uses no global matplotlib state."""
    steps = training_rows(rows)
    figure = Figure(figsize=(12, 10.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(4, 2, height_ratios=[3, 2.4, 2, 1.5])
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", fontweight="bold")

    draw_reward(figure.add_subplot(grid[0, 0]), rows, steps)
    draw_staleness(figure.add_subplot(grid[0, 1]), steps)
    draw_queue(figure.add_subplot(grid[1, 0]), steps)
    draw_step_time(figure.add_subplot(grid[1, 1]), steps)
    window = loop_window(lanes)
    whole, detail = figure.add_subplot(grid[3, :]), figure.add_subplot(grid[2, :])
    draw_timeline(detail, lanes, window, zoom_window(lanes), f"A few steps in detail{_overlap_text(lanes, window)}")
    draw_timeline(whole, lanes, window, window, "The whole run")
    figure.savefig(path, dpi=110)


def draw_reward(axes: Axes, rows: Sequence[Row], steps: Sequence[Row]) -> None:
    _prepare(axes, "Reward", "step")
    points = _series(steps, "rollout/raw_reward")
    if not points:
        return _say_empty(axes)
    x, y = zip(*points, strict=True)
    axes.plot(x, y, color=LANES["generation"][1], alpha=0.35, linewidth=1, label="batch mean")
    axes.plot(x, running_mean(y, SMOOTHING), color=LANES["generation"][1], linewidth=2, label=f"mean of {SMOOTHING}")
    evaluations: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, score in eval_scores(row).items():
            evaluations.setdefault(name, []).append((steps_trained(row), score))
    for name, scored in evaluations.items():
        axes.plot(*zip(*sorted(scored), strict=True), "D--", color=LANES["eval"][1], linewidth=1, label=f"eval {name}")
    if min(y) >= 0 and max(y) <= 1:
        axes.set_ylim(-0.03, 1.03)
    axes.legend(loc="lower right", fontsize=8, frameon=False)


def draw_staleness(axes: Axes, steps: Sequence[Row]) -> None:
    _prepare(axes, "Staleness of trained groups", "step", "weight versions")
    mean = _series(steps, "rollout/fully_async/trained_avg_staleness")
    largest = _series(steps, "rollout/fully_async/trained_max_staleness")
    if not mean:
        return _say_empty(axes, "not measured")
    if largest:
        axes.step(*zip(*largest, strict=True), where="mid", color="#c44e52", alpha=0.6, linewidth=1.2, label="oldest")
    axes.plot(*zip(*mean, strict=True), color="#c44e52", linewidth=2, label="mean")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower right", fontsize=8, frameon=False)


def draw_queue(axes: Axes, steps: Sequence[Row]) -> None:
    _prepare(axes, "Finished groups waiting, and groups recycled", "step", "groups")
    queue = _series(steps, "rollout/fully_async/queue_size")
    if not queue:
        return _say_empty(axes, "not measured")
    x, y = zip(*queue, strict=True)
    axes.fill_between(x, y, step="mid", color=LANES["generation"][1], alpha=0.25, linewidth=0)
    axes.step(x, y, where="mid", color=LANES["generation"][1], linewidth=1.5, label="queue")
    for kind, colour in (("stale", "#c44e52"), ("aborted", "#8c564b")):
        recycled = _series(steps, f"rollout/fully_async/{kind}_groups_recycled")
        if any(count for _, count in recycled):
            at, counts = zip(*recycled, strict=True)
            axes.bar(at, counts, width=0.9, color=colour, label=f"recycled: {kind}")
    axes.set_ylim(0, max(1.0, axes.dataLim.y1) * 1.25)  # room for the legend
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper right", fontsize=8, frameon=False, ncols=3)


def draw_step_time(axes: Axes, steps: Sequence[Row]) -> None:
    _prepare(axes, "Where a step's time goes", "step", "share of the step")
    parts = {
        "training": "perf/train_time",
        "weight_update": "perf/update_weights_time",
        "wait": "perf/train_wait_time",
        "eval": "perf/eval_time",
    }
    timed = [row for row in steps if row.get("perf/step_time")]
    if not timed:
        return _say_empty(axes)
    shares = {
        lane: [min(1.0, (row.get(key) or 0.0) / row["perf/step_time"]) for row in timed] for lane, key in parts.items()
    }
    shown = {lane: values for lane, values in shares.items() if any(values)}
    if not shown:
        return _say_empty(axes)
    axes.stackplot(
        [row["step"] + 1 for row in timed],
        *shown.values(),
        labels=[LANES[lane][0] for lane in shown],
        colors=[LANES[lane][1] for lane in shown],
        alpha=0.85,
        linewidth=0,
    )
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, fontsize=8, frameon=False)
    return None


def draw_timeline(axes: Axes, lanes: Lanes, origin: Interval | None, shown: Interval | None, title: str) -> None:
    """One row a lane; seconds since the start of `origin`, cut to `shown`."""
    _prepare(axes, title, "seconds since the first step began")
    axes.grid(axis="y", visible=False)
    present = [lane for lane in LANES if origin and intervals.overlap(lanes.get(lane, []), [origin])]
    if origin is None or shown is None or not present:
        return _say_empty(axes)
    for row, lane in enumerate(present):
        bars = [(start - origin[0], end - start) for start, end in intervals.intersection(lanes[lane], [shown])]
        axes.broken_barh(bars, (row - 0.38, 0.76), color=LANES[lane][1], linewidth=0.3)
    axes.set_yticks(range(len(present)), [LANES[lane][0] for lane in present])
    axes.set_ylim(len(present) - 0.45, -0.55)
    axes.set_xlim(shown[0] - origin[0], shown[1] - origin[0])
    return None


def zoom_window(lanes: Lanes) -> Interval | None:
    """From the start of a training step in the middle of the run to the start of the step `ZOOM_STEPS` later."""
    training = intervals.merged(lanes.get("training", []))
    if not training:
        return None
    first = max(0, len(training) // 2 - ZOOM_STEPS // 2)
    chosen = training[first : first + ZOOM_STEPS + 1]
    return chosen[0][0], chosen[-1][0] if len(chosen) > 1 else chosen[-1][1]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` values at each place, of fewer at the beginning."""
    means = []
    for end in range(1, len(values) + 1):
        tail = values[max(0, end - window) : end]
        means.append(sum(tail) / len(tail))
    return means


def _overlap_text(lanes: Lanes, window: Interval | None) -> str:
    training = intervals.intersection(lanes.get("training", []), [window]) if window else []
    seconds = intervals.total(training)
    if not seconds:
        return ""
    share = intervals.overlap(lanes.get("generation", []), training) / seconds
    return f": over the whole run, generation went on during {share:.0%} of the training time"


def _series(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """(step, value) with the first step as 1; records without the key, or with null, are left out."""
    return [(row["step"] + 1, row[key]) for row in rows if row.get(key) is not None]


def _prepare(axes: Axes, title: str, xlabel: str, ylabel: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)


def _say_empty(axes: Axes, text: str = "no data") -> Any:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#888888")
    axes.set_xticks([])
    axes.set_yticks([])
