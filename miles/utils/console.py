"""What the person who started the run sees: a progress bar with the time left, one line a step, a sample now and then.

On a terminal the bar stays at the bottom and the lines scroll above it. Elsewhere (a file, a pipe, CI) there is no bar
and no control character: each step's line ends with the time left.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from miles.utils.bottleneck import BottleneckWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_TEXT = 200
"""Characters of a prompt or answer that are shown."""

_EVAL_DETAIL = re.compile(r"/|-truncated_ratio$|-none_reward_ratio$|-pass@\d+$|^skipped_")
_EVAL_LABELS = frozenset(
    (
        "step",
        "weight_version",
        "steps_after_version",
        "steps_trained",
        "lag_steps",
        "duration_seconds",
        "export_time_seconds",
    )
)
_DROPPED = "rollout/dynamic_filter/drop_"
_RECYCLED = re.compile(r"^rollout/fully_async/\w+_groups_recycled$")


class StepConsole:
    """Prints to `stream`, standard output by default. `total_steps` counts from step 0; `start` is where a resumed run
    begins. `clock` gives seconds and is replaceable for tests."""

    def __init__(
        self,
        total_steps: int,
        *,
        start: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._start = start
        self._stream = stream or sys.stdout
        self._clock = clock
        self._began = clock()
        self._bottleneck = BottleneckWatch()
        self._bar: Any = None
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_steps,
                initial=start,
                file=self._stream,
                dynamic_ncols=True,
                unit="step",
                leave=False,
                bar_format="{percentage:3.0f}% |{bar}| step {n_fmt} of {total_fmt}, {elapsed} gone, {remaining} left",
            )

    def note(self, text: str) -> None:
        """A line that belongs to no step."""
        self._write(text)

    def step(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """One line for the finished step `rollout_id`, and now and then one that names its bottleneck."""
        line = step_line(rollout_id, self._total, metrics)
        if self._bar is not None:
            self._bar.update(rollout_id + 1 - self._bar.n)
            self._write(line)
        else:
            self._write(f"{line}  left {duration(self._seconds_left(rollout_id))}")
        if sentence := self._bottleneck.step(rollout_id, metrics):
            self._write(f"    {sentence}")

    def eval(
        self,
        metrics: Mapping[str, float],
        *,
        step: int | None = None,
        skipped: str | None = None,
        message: str = "",
    ) -> None:
        """One line for an evaluation that is on no step's line: the one before the first, or one that went on beside
        training and measured the weights after `step`. `skipped`: why it has no result."""
        result = eval_text(metrics) or "without a result"
        if skipped is not None:
            result = f"skipped ({skipped})" + (f": {quoted(message)}" if message else "")
        self._write("  ".join(["eval", *([f"of step {step + 1}"] if step is not None else []), result]))

    def sample(self, sample: Mapping[str, Any]) -> None:
        """One finished sample: prompt, response, label, reward, weight_versions. Missing keys are left out."""
        if sample:
            self._write(sample_line(sample))

    def close(self) -> None:
        """Remove the bar. May be called twice."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _seconds_left(self, rollout_id: int) -> float:
        done = rollout_id + 1 - self._start
        return (self._clock() - self._began) / max(done, 1) * (self._total - rollout_id - 1)

    def _write(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
            return
        self._stream.write(line + "\n")
        self._stream.flush()


def step_line(rollout_id: int, total: int, metrics: Mapping[str, float]) -> str:
    """`step  12/150  reward 0.413  ...`: what is there, in a fixed order. The first step is 1."""
    width = len(str(total))
    fields = [
        f"step {rollout_id + 1:>{width}}/{total}",
        *_field(metrics, "reward", "rollout/raw_reward", "{:.3f}"),
        *_field(metrics, "loss", "train/loss", "{:+.4f}"),
        *_field(metrics, "grad", "train/grad_norm", "{:.3f}"),
        *_field(metrics, "length", "rollout/response_len/mean", "{:.1f}"),
        *_staleness_field(metrics),
        *_field(metrics, "queue", "rollout/fully_async/queue_size", "{:.0f}"),
        *_count_field("recycled", (value for key, value in metrics.items() if _RECYCLED.match(key))),
        *_count_field("dropped", (value for key, value in metrics.items() if key.startswith(_DROPPED))),
        *_field(metrics, "waited", "perf/wait_time_ratio", "{:.0%}"),
        *_field(metrics, "took", "perf/step_time", "{:.2f} s"),
    ]
    evaluation = eval_text(metrics)
    return "  ".join([*fields, f"eval {evaluation}"] if evaluation else fields)


def eval_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """The mean reward of each evaluated data set: `eval/<name>` without the details (`eval/<name>-pass@4`, ...)."""
    scores = {key.removeprefix("eval/"): value for key, value in metrics.items() if key.startswith("eval/")}
    return {name: value for name, value in scores.items() if not _EVAL_DETAIL.search(name) and name not in _EVAL_LABELS}


def eval_text(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in eval_scores(metrics).items())


def sample_line(sample: Mapping[str, Any]) -> str:
    """`   "52914>" -> "12459"  right: "12459"  reward 1  weights 11`. Texts are quoted, so nothing breaks the line."""
    parts = [f"    {quoted(sample.get('prompt', ''))} -> {quoted(sample.get('response', ''))}"]
    if sample.get("label") is not None:
        parts.append(f"label {quoted(sample['label'])}")
    if (reward := sample.get("reward")) is not None:
        parts.append(f"reward {reward:g}" if isinstance(reward, int | float) else f"reward {reward}")
    if versions := sample.get("weight_versions"):
        # Consecutive ones of a long answer repeat; each is named once, in order.
        parts.append(f"weights {', '.join(dict.fromkeys(map(str, versions)))}")
    return "  ".join(parts)


def quoted(text: Any) -> str:
    """On one line, without control characters, the middle left out of long ones."""
    if not isinstance(text, str):
        text = json.dumps(text, ensure_ascii=False, default=str)
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        text = f"{text[:half]} ...({len(text) - 2 * half} more)... {text[-half:]}"
    # repr-like escapes of everything that is not printable, with double quotes.
    return '"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + '"'


def duration(seconds: float) -> str:
    """`0:42`, `12:05`, `3:04:00`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def print_summary(text: str, *, stream: TextIO | None = None) -> None:
    """The end of a run that went well."""
    stream = stream or sys.stdout
    stream.write(f"\n{text}\n")
    stream.flush()


def print_note(text: str, *, stream: TextIO | None = None) -> None:
    """Say what is going on where no step does."""
    stream = stream or sys.stdout
    stream.write(text + "\n")
    stream.flush()


def print_error(text: str, *, stream: TextIO | None = None) -> None:
    """The end of a run that did not: one message on standard error."""
    stream = stream or sys.stderr
    stream.write(f"\nmiles: {text}\n")
    stream.flush()


def _field(metrics: Mapping[str, float], label: str, key: str, form: str) -> list[str]:
    value = metrics.get(key)
    return [] if value is None else [f"{label} {form.format(value)}"]


def _staleness_field(metrics: Mapping[str, float]) -> list[str]:
    mean = metrics.get("rollout/fully_async/trained_avg_staleness")
    largest = metrics.get("rollout/fully_async/trained_max_staleness")
    if mean is None:
        return []
    return [f"staleness {mean:.1f}" if largest is None else f"staleness {mean:.1f} (max {largest:.0f})"]


def _count_field(label: str, values: Any) -> list[str]:
    count = sum(values)
    return [f"{label} {count:.0f}"] if count else []
