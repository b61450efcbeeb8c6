"""The summary against numbers worked out by hand, and a picture for every shape of run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from miles.utils.run_picture import draw_idle, draw_step_time, draw_wasted, running_mean, zoom_window
from miles.utils.run_report import (
    bottleneck_summary,
    format_summary,
    generating,
    loop_window,
    main,
    read_json_lines,
    read_metrics,
    report_of_stopped_run,
    summarize,
    write_report,
)
from tests.fast.utils.synthetic_run import write_run

if TYPE_CHECKING:
    from pathlib import Path

FULLY_ASYNC = "rollout/fully_async"


def step(index: int, reward: float, **more: Any) -> dict[str, Any]:
    return {"step": index, "time": 0.0, "rollout/raw_reward": reward, "rollout/num_groups": 2, **more}


def test_reward_is_the_mean_of_ten_steps_at_each_end() -> None:
    rows = [step(i, i / 100) for i in range(30)]
    assert summarize(rows, {})["reward"] == {
        "first": pytest.approx(0.045),
        "last": pytest.approx(0.245),
        "mean_of_steps": 10,
    }


def test_a_short_run_compares_its_halves() -> None:
    reward = summarize([step(0, 0.0), step(1, 0.5), step(2, 1.0)], {})["reward"]
    assert reward == {"first": 0.0, "last": 1.0, "mean_of_steps": 1}


def test_evaluations_before_and_after() -> None:
    rows = [
        {"step": 0, "eval/sort": 0.3, "eval/sort-pass@1": 0.3},
        step(0, 0.3),
        step(1, 0.6, **{"eval/sort": 0.5}),
        step(2, 0.9, **{"eval/sort": 0.9}),
    ]
    summary = summarize(rows, {})
    assert summary["steps"] == 3
    assert summary["eval"] == {"sort": {"before": 0.3, "after": 0.9}}
    assert summarize(rows[1:], {})["eval"] == {"sort": {"before": None, "after": 0.9}}
    assert summarize(rows[:2], {})["eval"] == {"sort": {"before": 0.3, "after": None}}


def test_an_evaluation_that_ran_beside_training_counts_where_its_weights_belong() -> None:
    late = [
        {"step": 1, "eval/sort": 0.9, "eval/steps_trained": 2},
        {"step": 0, "eval/sort": 0.3, "eval/steps_trained": 0},
        {"step": 0, "eval/sort": 0.5, "eval/steps_trained": 1},
    ]
    assert summarize([step(0, 0.2), step(1, 0.4), *late], {})["eval"] == {"sort": {"before": 0.3, "after": 0.9}}


def test_times_count_the_training_loop_only() -> None:
    lanes = {
        "eval": [(0.0, 5.0)],
        "generation": [(0.0, 14.0), (15.0, 19.0), (25.0, 40.0)],
        "wait": [(10.0, 12.0), (19.0, 19.5)],
        "training": [(12.0, 16.0), (19.5, 22.0)],
        "weight_update": [(16.0, 17.0), (22.0, 30.0)],
    }
    assert loop_window(lanes) == (10.0, 30.0)
    times = summarize([step(0, 1.0, **{"perf/step_time": 0.5}), step(1, 1.0, **{"perf/step_time": 1.5})], lanes)["time"]
    assert times["loop"] == 20.0
    assert times["generation"] == 4.0 + 4.0 + 5.0
    assert times["training"] == 6.5
    assert times["overlap"] == 2.0 + 1.0
    assert times["overlap_share_of_training"] == pytest.approx(3.0 / 6.5)
    assert times["weight_update"] == 9.0
    assert times["trainer_waited"] == 2.5
    assert times["trainer_waited_share"] == pytest.approx(0.125)
    assert times["eval"] == 5.0
    assert times["step_mean"] == 1.0


def test_generation_does_not_count_the_pauses_of_weight_updates() -> None:
    """Requests stay in flight while the engines are paused, and nothing is written."""
    lanes = {
        "generation": [(0.0, 10.0), (12.0, 20.0)],
        "wait": [(0.0, 2.0), (11.0, 12.0)],
        "training": [(2.0, 6.0), (12.0, 18.0)],
        "weight_update": [(6.0, 8.0), (18.0, 20.0)],
        "pause": [(6.5, 7.5), (11.0, 11.5), (18.0, 19.75)],  # one while nothing was in flight
    }
    assert generating(lanes) == [(0.0, 6.5), (7.5, 10.0), (12.0, 18.0), (19.75, 20.0)]
    times = summarize([step(0, 1.0)], lanes)["time"]
    assert times["generation"] == 6.5 + 2.5 + 6.0 + 0.25
    assert times["overlap"] == 4.0 + 6.0
    assert times["weight_update"] == 4.0


def test_tokens_and_idle_sides_over_the_run() -> None:
    def fully_async(index: int, seconds: float, **metrics: float) -> dict[str, Any]:
        named = {f"rollout/fully_async/{name}": value for name, value in metrics.items()}
        return step(index, 1.0, **{"perf/step_time": seconds, **named})

    steps = [
        fully_async(
            0, 1.0, generation_idle_fraction=0.5, train_idle_fraction=0.1, tokens_generated=100, tokens_trained=60
        ),
        fully_async(
            1,
            3.0,
            generation_idle_fraction=0.1,
            train_idle_fraction=0.3,
            tokens_generated=200,
            tokens_trained=150,
            tokens_wasted_stale=40,
            tokens_wasted_max_retries=0,
        ),
    ]
    summary = summarize(steps, {})
    assert summary["tokens"] == {"generated": 300, "trained": 210, "wasted": {"stale": 40}}
    assert summary["idle"] == pytest.approx({"generation": 0.2, "train": 0.25})
    assert "300 generated, 210 trained, 40 thrown away (stale 40)" in format_summary(summary)
    assert summarize([step(0, 1.0)], {})["idle"] == {"generation": None, "train": None}


def test_engines_that_were_started_again_are_counted_over_the_run() -> None:
    rows = [step(i, 1.0, **{"rollout/engine_restarts": count}) for i, count in enumerate((0, 2, 1))]
    summary = summarize(rows, {})
    assert summary["engine_restarts"] == 3
    assert "3 started again (rollout/engine_restarts)" in format_summary(summary)
    assert "started again" not in format_summary(summarize([step(0, 1.0)], {}))


def test_staleness_weighs_each_group_alike() -> None:
    rows = [
        step(0, 1.0),  # not measured
        step(1, 1.0, **{f"{FULLY_ASYNC}/trained_avg_staleness": 1.0, f"{FULLY_ASYNC}/trained_max_staleness": 3}),
        step(2, 1.0, **{f"{FULLY_ASYNC}/trained_avg_staleness": 2.0, f"{FULLY_ASYNC}/trained_max_staleness": 2})
        | {"rollout/num_groups": 6},
    ]
    assert summarize(rows, {})["staleness"] == {"mean": 1.75, "max": 3}
    assert summarize(rows[:1], {})["staleness"] == {"mean": None, "max": None}


def test_groups_by_reason() -> None:
    rows = [
        step(0, 1.0, **{f"{FULLY_ASYNC}/stale_groups_recycled": 1, "rollout/dynamic_filter/drop_zero_std_1.0": 3}),
        step(1, 1.0, **{f"{FULLY_ASYNC}/stale_groups_recycled": 2, f"{FULLY_ASYNC}/aborted_groups_recycled": 0}),
        step(2, 1.0, **{"rollout/trimmed_samples": 4, "rollout/dynamic_filter/drop_zero_std_0.0": 1}),
    ]
    summary = summarize(rows, {})
    assert summary["groups"] == {
        "trained": 6,
        "recycled": {"stale": 3},
        "dropped": {"zero_std_0.0": 1, "zero_std_1.0": 3},
        "trimmed_samples": 4,
    }
    text = format_summary(summary)
    assert "6 trained, 3 recycled (stale 3), 4 dropped (zero_std_0.0 1, zero_std_1.0 3), 4 samples trimmed" in text


def test_null_metrics_are_left_out() -> None:
    rows = [step(0, 0.5), {"step": 1, "rollout/raw_reward": None, "rollout/num_groups": 2}, step(2, 0.7)]
    reward = summarize(rows, {})["reward"]
    assert (reward["first"], reward["last"]) == (0.5, 0.7)


def test_report_of_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run", steps=40)
    summary = write_report(run_dir)
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert summary["steps"] == 40 and summary["groups"]["trained"] == 640
    assert summary["time"]["overlap_share_of_training"] > 0.9
    assert summary["reward"]["last"] > summary["reward"]["first"]
    text = format_summary(summary)
    assert "eval sort" in text and "0.310 -> 0.970" in text and str(run_dir) in text

    (run_dir / "summary.json").unlink()
    assert main([str(run_dir)]) == 0
    assert text in capsys.readouterr().out and (run_dir / "summary.json").exists()


def test_without_a_home_directory_the_report_says_nothing_more(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=3)
    environment = {name: value for name, value in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME")}
    environment |= {"HOME": "/dev/null/home", "XDG_CACHE_HOME": "/dev/null/cache", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "miles.utils.run_report", str(run_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_of_one_step_without_a_timeline_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time": 0, "train/loss": 1.0}\n')
    summary = write_report(tmp_path)
    assert summary["reward"]["first"] is None and summary["time"]["loop"] is None
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert "trainer waited" in format_summary(summary)


def test_a_cut_off_last_line_is_left_out_and_any_other_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "tra')
    assert read_json_lines(path) == [{"step": 0}]
    path.write_text('{"step": 0\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: not JSON"):
        read_json_lines(path)


def test_a_directory_without_a_run_is_one_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "is not a run directory: it has no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="ended before its first step"):
        read_metrics(tmp_path)


def test_a_stopped_run_has_a_report_of_what_it_did(tmp_path: Path) -> None:
    assert report_of_stopped_run(tmp_path) == "", "no step was finished"
    run_dir = write_run(tmp_path / "run", steps=3)
    assert str(run_dir / "report.png") in report_of_stopped_run(run_dir)
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 3


def test_the_legend_of_step_times_lies_beside_the_data(tmp_path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw_step_time(axes, read_metrics(write_run(tmp_path, steps=20))[1:])
    figure.draw_without_rendering()
    legend = axes.get_legend()
    assert legend is not None
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_the_picture_shows_what_was_thrown_away_and_who_was_idle() -> None:
    from matplotlib.figure import Figure

    prefix = "rollout/fully_async/"
    steps = [
        step(
            i,
            1.0,
            **{
                f"{prefix}tokens_generated": 100,
                f"{prefix}tokens_wasted_stale": 20 * i,
                f"{prefix}tokens_wasted_aborted": 10,
                f"{prefix}tokens_wasted_filtered": 0,
                f"{prefix}generation_idle_fraction": 0.25,
                f"{prefix}train_idle_fraction": 0.5,
            },
        )
        for i in range(3)
    ]
    wasted, idle = Figure().subplots(2)
    draw_wasted(wasted, steps)
    assert [text.get_text() for text in wasted.get_legend().get_texts()] == ["aborted", "stale"]
    assert [bar.get_height() for bar in wasted.patches] == pytest.approx([0.1, 0.1, 0.1, 0.0, 0.2, 0.4])
    assert [bar.get_y() for bar in wasted.patches] == pytest.approx([0, 0, 0, 0.1, 0.1, 0.1])  # on top of the others
    draw_idle(idle, steps)
    assert [list(line.get_ydata()) for line in idle.lines[1::2]] == [[0.25] * 3, [0.5] * 3]


def test_the_detailed_timeline_shows_a_dozen_steps_from_the_middle() -> None:
    training = [(float(i), i + 0.5) for i in range(100)]
    assert zoom_window({"training": training}) == (44.0, 56.0)
    assert zoom_window({"training": training[:1]}) == (0.0, 0.5)
    assert zoom_window({}) is None


def test_running_mean_uses_what_there_is() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_the_evaluation_after_the_last_step_is_not_the_runs_bottleneck() -> None:
    """Seconds: 10 a step, of which the trainer waits 3; then 4 of evaluation, in the last step's row."""
    prefix = "rollout/fully_async/"
    step = {
        "perf/step_time": 10.0,
        "perf/train_wait_time": 3.0,
        f"{prefix}generation_idle_fraction": 0.0,
        f"{prefix}train_idle_fraction": 0.3,
    }
    last = {**step, "perf/step_time": 14.0, "perf/eval_time": 4.0, f"{prefix}train_idle_fraction": 0.5}
    assert "the trainer waited for 30%" in (bottleneck_summary([step, last]) or "")
    each = {**last, "perf/eval_time": 6.0}
    assert "Evaluation is the bottleneck" in (bottleneck_summary([each] * 5) or "")
