"""A run directory as a fully asynchronous run of a given length writes it, for the tests of report and picture."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

START = 1_800_000_000.0


def write_run(run_dir: Path, *, steps: int = 150, seed: int = 0) -> Path:
    """Steps of about 0.2 s: a wait, training, a weight update; generation goes on but for pauses at the updates."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = [{"step": 0, "time": START, "eval/sort": 0.31, "eval/sort-truncated_ratio": 0.02}]
    timeline: list[dict[str, Any]] = [{"lane": "eval", "start": START - 1, "end": START, "step": 0}]
    now = began_generation = START
    for step in range(steps):
        wait = rng.choice([0.0, 0.0, 0.004, 0.03])
        train, update = rng.uniform(0.11, 0.16), rng.uniform(0.012, 0.02)
        marks = [now, now + wait, now + wait + train, now + wait + train + update]
        timeline += [
            {"lane": "wait", "start": marks[0], "end": marks[1], "step": None},
            {"lane": "generation", "start": began_generation, "end": marks[2] + update / 4, "step": step},
            {"lane": "training", "start": marks[1], "end": marks[2], "step": step},
            {"lane": "weight_update", "start": marks[2], "end": marks[3], "step": None},
        ]
        began_generation, now = marks[3] - update / 4, marks[3]
        rows.append(
            {
                "step": step,
                "time": now,
                "rollout/raw_reward": min(1.0, 0.3 + 0.66 * step / (0.5 * steps + step) * 1.4 + rng.gauss(0, 0.03)),
                "rollout/response_len/mean": 5.9,
                "rollout/num_groups": 16,
                "rollout/num_samples": 256,
                "rollout/trimmed_samples": 0,
                "rollout/fully_async/queue_size": rng.randint(0, 16),
                "rollout/fully_async/queue_peak": 16,
                "rollout/fully_async/generation_idle_fraction": update / (wait + train + update) / 2,
                "rollout/fully_async/train_idle_fraction": wait / (wait + train + update),
                "rollout/fully_async/tokens_generated": 1500,
                "rollout/fully_async/tokens_trained": 1450,
                "rollout/fully_async/tokens_wasted_stale": rng.choice([0, 0, 90]),
                "rollout/fully_async/trained_avg_staleness": rng.uniform(0.8, 1.6) if step else 0.0,
                "rollout/fully_async/trained_max_staleness": min(2, step),
                "rollout/fully_async/aborted_groups_recycled": 0,
                "rollout/fully_async/stale_groups_recycled": int(rng.random() < 0.1),
                "train/loss": rng.gauss(0, 0.01),
                "train/grad_norm": rng.uniform(0.2, 0.5),
                "perf/train_wait_time": wait,
                "perf/train_time": train,
                "perf/update_weights_time": update,
                "perf/step_time": wait + train + update,
                "perf/wait_time_ratio": wait / (wait + train + update),
            }
        )
    rows[-1]["eval/sort"] = 0.97
    run_dir.mkdir(parents=True, exist_ok=True)
    for name, records in (("metrics.jsonl", rows), ("timeline.jsonl", timeline)):
        (run_dir / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return run_dir
