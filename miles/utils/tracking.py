"""Where a run's numbers go: JSON lines and TensorBoard always, Weights & Biases by flag.

    driver --log(metrics, step)--> Tracker --> <run_dir>/metrics.jsonl      one object a call, flushed
                                           --> <run_dir>/tensorboard/       event files
                                           --> Weights & Biases             --use-wandb (works offline)

Only the driver has a Tracker, and it logs once a step with every key of the step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import secrets
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from miles.utils.file_errors import named_errors

if TYPE_CHECKING:
    from argparse import Namespace

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.json"
SECRET_FLAGS = frozenset({"wandb_key"})
RECORDED_PACKAGES = (
    "miles",
    "torch",
    "transformers",
    "megatron-core",
    "ray",
    "sglang",
    "sglang-router",
    "tokenizers",
    "safetensors",
    "aiohttp",
    "numpy",
)


class Sink(Protocol):
    """One place that numbers go to."""

    def log(self, metrics: dict[str, float], *, step: int) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Sends each step's metrics to every sink.

    Raises ValueError where a sink's package is missing. `close` may be called twice; `log` after it is an error.
    """

    def __init__(self, args: Namespace, run_dir: str | Path) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = []
        self._closed = False
        # What can be missing comes first: an error leaves no file open.
        if getattr(args, "use_wandb", False):
            self._sinks.append(WandbSink(args, run_dir))
        self._sinks.append(TensorBoardSink(tensorboard_dir(args, run_dir)))
        self._sinks.append(JsonLinesSink(run_dir / METRICS_FILE))

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Record one step. Values are numbers, or zero-dimensional arrays and tensors; others are a TypeError."""
        if self._closed:
            raise ValueError(f"the tracker is closed: the metrics of step {step} would be lost")
        plain = {key: as_number(key, value) for key, value in metrics.items()}
        for sink in self._sinks:
            sink.log(plain, step=step)

    def close(self) -> None:
        """Flush and close every sink."""
        if self._closed:
            return
        self._closed = True
        for sink in self._sinks:
            sink.close()


def as_number(key: str, value: Any) -> float:
    """A plain int or float. Takes numpy and torch scalars too."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, int | float):
        raise TypeError(f"metric {key!r} is {value!r} of type {type(value).__name__}; metrics are numbers")
    return value


class JsonLinesSink:
    """One JSON object a call: step, event, time (seconds since the epoch), metrics. NaN and infinities become null.

    `event` is "step" for the record of a training step, and "eval" for an evaluation that is in no step's record: the
    one before the first step, or one that went on beside training. "end": what the end of the data leaves.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        only_eval = any(key.startswith("eval/") for key in metrics) and not any(map(_of_a_step, metrics))
        only_end = all(key.startswith("end/") for key in metrics)
        row: dict[str, float | str | None] = {
            "step": step,
            "event": "end" if only_end else "eval" if only_eval else "step",
        }
        row["time"] = time.time()
        row |= {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        with named_errors(self._path):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        with named_errors(self._path):
            self._file.close()


def _of_a_step(key: str) -> bool:
    return key.startswith(("rollout/", "train/"))


def tensorboard_dir(args: Namespace, run_dir: Path) -> Path:
    """`<run_dir>/tensorboard`; with `--tb-project-name` and `--tb-experiment-name` their directories below it."""
    parts = [getattr(args, name, None) for name in ("tb_project_name", "tb_experiment_name")]
    return run_dir.joinpath("tensorboard", *[part for part in parts if part])


class TensorBoardSink:
    """Scalars in TensorBoard's event files, written without importing torch or TensorFlow."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise ValueError(f"the tensorboard package, which miles depends on, cannot be imported: {error}") from error
        self._writer = Writer(str(directory))

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()  # its own interval is two minutes

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases. `--wandb-mode offline` needs no network; `wandb sync` uploads the directory later.

    Each family of keys is drawn over its own axis: `rollout/step`, `train/step`, `eval/step`.
    """

    _FAMILIES = ("rollout", "train", "eval", "perf")

    def __init__(self, args: Namespace, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"--use-wandb: the wandb package cannot be imported ({error}); install it with "
                "pip install -e '.[wandb]', or leave --use-wandb out"
            ) from error
        if getattr(args, "wandb_key", None):
            wandb.login(key=args.wandb_key, host=getattr(args, "wandb_host", None))
        run_id = getattr(args, "wandb_run_id", None)
        group = getattr(args, "wandb_group", None)
        name = group or run_dir.name
        if group and getattr(args, "wandb_random_suffix", True):
            name = f"{group}_{secrets.token_hex(4)}"
        self._run = wandb.init(
            project=getattr(args, "wandb_project", None) or "miles",
            entity=getattr(args, "wandb_team", None),
            group=group,
            name=name,
            mode=getattr(args, "wandb_mode", None),
            dir=getattr(args, "wandb_dir", None) or str(run_dir),
            id=run_id,
            resume="allow" if run_id else None,
            config=resolved_config(args),
        )
        self._axis = {family: "train/step" if family == "perf" else f"{family}/step" for family in self._FAMILIES}
        for family, axis in self._axis.items():
            self._run.define_metric(axis)
            self._run.define_metric(f"{family}/*", step_metric=axis)

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        present = {key.split("/", 1)[0] for key in metrics}
        axes = {axis: step for family, axis in self._axis.items() if family in present}
        self._run.log({**metrics, **axes})

    def close(self) -> None:
        self._run.finish()


def resolved_config(args: Namespace) -> dict[str, Any]:
    """Every flag's value as JSON data, secrets masked."""
    return {
        key: "***" if key in SECRET_FLAGS and value else json_ready(value) for key, value in sorted(vars(args).items())
    }


def json_ready(value: Any) -> Any:
    """Dataclasses become objects, tuples and sets lists, unknown things their text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return json_ready({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def write_run_config(args: Namespace, run_dir: str | Path) -> Path:
    """Write `<run_dir>/config.json`: the resolved flags, and what they ran on. Returns its path."""
    path = Path(run_dir) / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    config = {
        "args": resolved_config(args),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "versions": {name: version for name in RECORDED_PACKAGES if (version := package_version(name))},
        "git_commit": git_commit(Path(__file__).parent),
    }
    with named_errors(path):
        path.write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def git_commit(directory: Path) -> str | None:
    """The commit that `directory` is at, with `-dirty` for local changes; None outside a repository or without git."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
