"""What the driver alone can tell about a step of fully asynchronous training."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_TRAINER_WORKS = ("perf/train_time", "perf/update_weights_time", "perf/save_time")


def fully_async_driver_metrics(metrics: Mapping[str, float], step_time: float) -> dict[str, float]:
    """The driver's part of the fixed key set, from the step's other metrics; times in seconds.

    The trainer is idle while it neither trains, nor publishes weights, nor saves: it waits for a batch, or for an
    evaluation. Engines pause only in a step that publishes weights; in any other the pause is 0.
    """
    busy = sum(metrics.get(key, 0.0) for key in _TRAINER_WORKS)
    idle = min(1.0, max(0.0, 1.0 - busy / step_time)) if step_time > 0 else 0.0
    return {
        "rollout/fully_async/train_idle_fraction": idle,
        "rollout/fully_async/weight_update_pause_seconds": metrics.get("perf/weight_update_pause_seconds", 0.0),
    }
