"""Lines for people: complete, in a fixed order, and free of control characters where there is no terminal."""

from __future__ import annotations

import io

import pytest

from miles.utils.console import (
    MAX_TEXT,
    StepConsole,
    duration,
    eval_scores,
    print_error,
    print_summary,
    quoted,
    sample_line,
    step_line,
)

METRICS = {
    "rollout/raw_reward": 0.40625,
    "train/loss": -0.00213,
    "train/grad_norm": 0.35,
    "rollout/response_len/mean": 5.94,
    "rollout/fully_async/trained_avg_staleness": 1.25,
    "rollout/fully_async/trained_max_staleness": 2,
    "rollout/fully_async/queue_size": 14,
    "rollout/fully_async/stale_groups_recycled": 2,
    "rollout/fully_async/aborted_groups_recycled": 1,
    "rollout/dynamic_filter/drop_zero_std_0.0": 4,
    "perf/wait_time_ratio": 0.123,
    "perf/step_time": 0.214,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_is_one_readable_line() -> None:
    assert step_line(11, 150, METRICS) == (
        "step  12/150  reward 0.406  loss -0.0021  grad 0.350  length 5.9  staleness 1.2 (max 2)  queue 14  recycled 3"
        "  dropped 4  waited 12%  took 0.21 s"
    )


def test_missing_and_zero_counts_are_left_out() -> None:
    assert step_line(0, 3, {"rollout/fully_async/stale_groups_recycled": 0}) == "step 1/3"


def test_an_evaluation_within_a_step_ends_its_line() -> None:
    assert step_line(2, 3, {"eval/sort": 0.9, "eval/sort-truncated_ratio": 0.0}) == "step 3/3  eval sort 0.900"


def test_eval_scores_are_the_names_without_their_details() -> None:
    metrics = {
        "eval/aime-24": 0.5,
        "eval/aime-24-truncated_ratio": 0.1,
        "eval/aime-24-none_reward_ratio": 0.0,
        "eval/aime-24-pass@16": 0.8,
        "eval/aime-24/response_len/mean": 7.0,
        "eval/step": 3,
        "eval/weight_version": 4,
        "eval/lag_steps": 1,
        "eval/skipped_busy": 1,
        "train/loss": 1.0,
    }
    assert eval_scores(metrics) == {"aime-24": 0.5}


def test_without_a_terminal_there_are_plain_lines_with_the_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    console = StepConsole(4, stream=stream, clock=clock)
    console.eval({"eval/sort": 0.31})
    clock.now += 30
    console.step(0, {"rollout/raw_reward": 0.5})
    console.sample({"prompt": "52914>", "response": "12459", "label": "12459", "reward": 1.0, "weight_versions": ["3"]})
    clock.now += 10
    console.step(1, {})
    console.close()
    console.close()
    assert stream.getvalue().splitlines() == [
        "eval  sort 0.310",
        "step 1/4  reward 0.500  left 1:30",
        '    "52914>" -> "12459"  label "12459"  reward 1  weights 3',
        "step 2/4  left 0:40",
    ]


def test_a_resumed_run_estimates_from_its_own_steps() -> None:
    stream, clock = io.StringIO(), Clock()
    console = StepConsole(10, start=8, stream=stream, clock=clock)
    clock.now += 5
    console.step(8, {})
    assert stream.getvalue() == "step  9/10  left 0:05\n"


def test_on_a_terminal_a_bar_stays_below_the_lines() -> None:
    stream = Terminal()
    console = StepConsole(4, stream=stream)
    console.step(0, {"rollout/raw_reward": 0.5})
    console.step(1, {"rollout/raw_reward": 0.6})
    console.close()
    text = stream.getvalue()
    assert "step 1/4  reward 0.500\n" in text and "step 2/4  reward 0.600\n" in text
    assert "step 2 of 4" in text and "left" in text


def test_nothing_in_a_sample_breaks_its_line() -> None:
    line = sample_line({"prompt": "a\nb\x1b[31m", "response": [{"role": "user"}], "reward": {"acc": 1}})
    assert line == r'    "a\nb\x1b[31m" -> "[{"role": "user"}]"  reward {' + "'acc': 1}"
    assert len(quoted("x" * 5000)) < MAX_TEXT + 40


def test_repeated_weight_versions_are_named_once() -> None:
    assert sample_line({"weight_versions": ["3", "3", "4"]}).endswith("weights 3, 4")


def test_an_empty_sample_prints_nothing() -> None:
    stream = io.StringIO()
    StepConsole(1, stream=stream).sample({})
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0:00"), (42.4, "0:42"), (725, "12:05"), (11_040, "3:04:00")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_end_is_one_message_on_the_right_stream(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary("all went well")
    print_error("it did not")
    captured = capsys.readouterr()
    assert captured.out == "\nall went well\n"
    assert captured.err == "\nmiles: it did not\n"


def test_an_evaluation_beside_training_names_its_step_or_says_why_it_is_missing() -> None:
    stream = io.StringIO()
    console = StepConsole(4, stream=stream)
    console.eval({"eval/sort": 0.31, "eval/weight_version": 3, "eval/lag_steps": 2}, step=1)
    console.eval({"eval/skipped_crashed": 1}, step=2, skipped="crashed", message="KeyError: 'x'\nmore")
    assert stream.getvalue().splitlines() == [
        "eval  of step 2  sort 0.310",
        "eval  of step 3  skipped (crashed): \"KeyError: 'x'\\nmore\"",
    ]
