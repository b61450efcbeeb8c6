"""The picture of a run: reward, staleness, queue, idle sides, step time, tokens thrown away, and generation against
training on one time axis."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from miles.utils import intervals
from miles.utils.console import eval_scores
from miles.utils.run_report import generating, loop_window, steps_trained, training_rows

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

_PREFIX = "rollout/fully_async/"
_WASTED = f"{_PREFIX}tokens_wasted_"
_REASON_COLOURS = ("#c44e52", "#8c564b", "#dd8452", "#937860", "#da8bc3", "#8c8c8c", "#ccb974")

SMOOTHING = 10
"""Steps in the running mean of the reward."""


def draw_report(rows: Sequence[Row], lanes: Lanes, path: Path, *, title: str) -> None:
    """Write the picture as PNG. Panels without data say so. Uses no global matplotlib state."""
    steps = training_rows(rows)
    figure = Figure(figsize=(12, 12.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(5, 2, height_ratios=[2.8, 2.2, 2.2, 2, 1.5])
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", fontweight="bold")

    draw_reward(figure.add_subplot(grid[0, 0]), rows, steps)
    draw_staleness(figure.add_subplot(grid[0, 1]), steps)
    draw_queue(figure.add_subplot(grid[1, 0]), steps)
    draw_idle(figure.add_subplot(grid[1, 1]), steps)
    draw_wasted(figure.add_subplot(grid[2, 0]), steps)
    draw_step_time(figure.add_subplot(grid[2, 1]), steps)
    window = loop_window(lanes)
    lanes = {**lanes, "generation": generating(lanes)}
    whole, detail = figure.add_subplot(grid[4, :]), figure.add_subplot(grid[3, :])
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
    mean = _series(steps, f"{_PREFIX}trained_avg_staleness")
    largest = _series(steps, f"{_PREFIX}trained_max_staleness")
    if not mean:
        return _say_empty(axes, "not measured")
    parts = {
        "came in flight": (_series(steps, f"{_PREFIX}trained_staleness_in_flight_mean"), LANES["generation"][1]),
        "came in the queue": (_series(steps, f"{_PREFIX}trained_staleness_in_queue_mean"), LANES["training"][1]),
    }
    if all(len(points) == len(mean) for points, _ in parts.values()):
        axes.stackplot(
            [x for x, _ in mean],
            *([y for _, y in points] for points, _ in parts.values()),
            labels=list(parts),
            colors=[colour for _, colour in parts.values()],
            alpha=0.35,
            linewidth=0,
        )
    if largest:
        axes.step(*zip(*largest, strict=True), where="mid", color="#c44e52", alpha=0.6, linewidth=1.2, label="oldest")
    axes.plot(*zip(*mean, strict=True), color="#c44e52", linewidth=2, label="mean")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(top=max(1.0, axes.dataLim.y1) * 1.3)  # room for the legend
    axes.legend(loc="upper right", fontsize=8, frameon=False, ncols=4)


def draw_queue(axes: Axes, steps: Sequence[Row]) -> None:
    _prepare(axes, "Finished groups waiting for the trainer", "step", "groups")
    queue, peak = _series(steps, f"{_PREFIX}queue_size"), _series(steps, f"{_PREFIX}queue_peak")
    if not queue:
        return _say_empty(axes, "not measured")
    if peak:
        axes.step(*zip(*peak, strict=True), where="mid", color="#888888", linewidth=1, label="most during the step")
    x, y = zip(*queue, strict=True)
    axes.fill_between(x, y, step="mid", color=LANES["generation"][1], alpha=0.25, linewidth=0)
    axes.step(x, y, where="mid", color=LANES["generation"][1], linewidth=1.5, label="left after the drain")
    axes.set_ylim(0, max(1.0, axes.dataLim.y1) * 1.25)  # room for the legend
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper right", fontsize=8, frameon=False, ncols=2)


def draw_idle(axes: Axes, steps: Sequence[Row]) -> None:
    _prepare(axes, "Idle sides", "step", "share of the step")
    shown = False
    for lane, name, label in (
        ("generation", "generation_idle_fraction", "generation: no sample in flight"),
        ("training", "train_idle_fraction", "trainer: waits"),
    ):
        points = _series(steps, _PREFIX + name)
        if points:
            shown = True
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=LANES[lane][1], alpha=0.3, linewidth=1)
            axes.plot(x, running_mean(y, SMOOTHING), color=LANES[lane][1], linewidth=2, label=label)
    if not shown:
        return _say_empty(axes, "not measured")
    axes.set_ylim(0, 1.2)  # room for the legend
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.legend(loc="upper right", fontsize=8, frameon=False, ncols=2)
    return None


def draw_wasted(axes: Axes, steps: Sequence[Row]) -> None:
    """Of all tokens that were generated in a step."""
    _prepare(axes, "Tokens thrown away, by reason", "step", "share of the generated")
    measured = [row for row in steps if row.get(f"{_PREFIX}tokens_generated")]
    if not measured:
        return _say_empty(axes, "not measured")
    reasons = sorted({key for row in measured for key, value in row.items() if value and key.startswith(_WASTED)})
    below = [0.0] * len(measured)
    for key, colour in zip(reasons, itertools.cycle(_REASON_COLOURS), strict=False):
        shares = [(row.get(key) or 0.0) / row[f"{_PREFIX}tokens_generated"] for row in measured]
        label = key.removeprefix(_WASTED).replace("_", " ")
        axes.bar([row["step"] + 1 for row in measured], shares, 0.9, below, color=colour, label=label)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    axes.set_ylim(0, max(0.1, *below) * 1.25)
    axes.set_xlim(measured[0]["step"] + 0.5, measured[-1]["step"] + 1.5)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    if reasons:
        axes.legend(loc="upper right", fontsize=8, frameon=False, ncols=4)
    else:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color="#888888")
    return None


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
    if xlabel == "step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _say_empty(axes: Axes, text: str = "no data") -> Any:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#888888")
    axes.set_xticks([])
    axes.set_yticks([])
