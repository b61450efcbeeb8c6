"""Numbers reach each sink, secrets and nonsense do not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from miles.utils.tracking import JsonLinesSink, Tracker, git_commit, resolved_config, tensorboard_dir, write_run_config


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_call_is_one_json_line_with_step_and_time(tmp_path: Path) -> None:
    tracker = Tracker(Namespace(), tmp_path / "run")
    tracker.log({"train/loss": 0.5, "rollout/num_groups": 16}, step=0)
    tracker.log({"train/loss": np.float32(0.25), "flag": True}, step=1)
    # Before close: a run that is killed keeps what it logged.
    first, second = rows(tmp_path / "run")
    assert first["step"] == 0 and first["time"] > 1e9
    assert first["train/loss"] == 0.5 and first["rollout/num_groups"] == 16
    assert second["train/loss"] == 0.25 and second["flag"] == 1
    tracker.close()
    tracker.close()


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    tracker = Tracker(Namespace(), tmp_path)
    tracker.log({"a": float("nan"), "b": float("inf"), "c": 1.0}, step=0)
    tracker.close()
    assert rows(tmp_path)[0] | {"time": 0} == {
        "step": 0,
        "event": "step",
        "time": 0,
        "a": None,
        "b": None,
        "c": 1.0,
    }


def test_an_evaluation_on_its_own_is_told_from_a_step(tmp_path: Path) -> None:
    tracker = Tracker(Namespace(), tmp_path)
    tracker.log({"eval/sort": 0.3, "perf/eval_time": 1.0}, step=0)
    tracker.log({"train/loss": 0.1, "rollout/raw_reward": 0.3}, step=0)
    tracker.log({"train/loss": 0.1, "eval/sort": 0.4}, step=1)
    tracker.close()
    assert [(row["step"], row["event"]) for row in rows(tmp_path)] == [(0, "eval"), (0, "step"), (1, "step")]


def test_a_metric_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    tracker = Tracker(Namespace(), tmp_path)
    with pytest.raises(TypeError, match="'train/loss' is 'low' of type str"):
        tracker.log({"train/loss": "low"}, step=0)  # type: ignore[dict-item]
    tracker.close()
    with pytest.raises(ValueError, match="step 3 would be lost"):
        tracker.log({"a": 1}, step=3)


def test_tensorboard_gets_the_same_scalars(tmp_path: Path) -> None:
    tracker = Tracker(Namespace(), tmp_path)
    for step in range(3):
        tracker.log({"train/loss": 1.0 / (step + 1), "rollout/raw_reward": step}, step=step)
    tracker.close()
    assert scalars(tmp_path / "tensorboard") == {
        "train/loss": [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))],
        "rollout/raw_reward": [(0, 0.0), (1, 1.0), (2, 2.0)],
    }


def scalars(directory: Path) -> dict[str, list[tuple[int, Any]]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    result: dict[str, list[tuple[int, Any]]] = {}
    for path in directory.glob("events*"):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = float(tensor_util.make_ndarray(value.tensor))
                result.setdefault(value.tag, []).append((event.step, number))
    return result


def test_tensorboard_names_make_directories(tmp_path: Path) -> None:
    assert tensorboard_dir(Namespace(), tmp_path) == tmp_path / "tensorboard"
    named = Namespace(tb_project_name="sort", tb_experiment_name=None)
    assert tensorboard_dir(named, tmp_path) == tmp_path / "tensorboard" / "sort"


class FakeWandb:
    """Records what a Tracker does with the wandb module."""

    def __init__(self) -> None:
        self.init_arguments: dict[str, Any] = {}
        self.axes: dict[str, str | None] = {}
        self.logged: list[dict[str, float]] = []
        self.logins: list[str] = []
        self.finished = 0

    def login(self, *, key: str, host: str | None) -> None:
        self.logins.append(key)

    def init(self, **arguments: Any) -> Any:
        self.init_arguments = arguments
        return SimpleNamespace(define_metric=self.define_metric, log=self.logged.append, finish=self.finish)

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_flags_axes_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    args = Namespace(
        use_wandb=True, wandb_project="p", wandb_team="t", wandb_group="g", wandb_mode="offline", wandb_key="secret"
    )
    tracker = Tracker(args, tmp_path / "20260101-000000")
    tracker.log({"rollout/raw_reward": 0.5, "train/loss": 1.0}, step=7)
    tracker.close()
    tracker.close()
    expected = {"project": "p", "entity": "t", "group": "g", "mode": "offline"}
    assert fake.init_arguments.items() >= expected.items()
    assert re.fullmatch("g_[0-9a-f]{8}", fake.init_arguments["name"])
    assert fake.init_arguments["dir"] == str(tmp_path / "20260101-000000")
    assert fake.logins == ["secret"] and "secret" not in json.dumps(fake.init_arguments)
    assert fake.axes["rollout/*"] == "rollout/step" and fake.axes["eval/*"] == "eval/step"
    assert fake.logged == [{"rollout/raw_reward": 0.5, "train/loss": 1.0, "rollout/step": 7, "train/step": 7}]
    assert fake.finished == 1


def test_wandb_runs_are_named_after_the_run_directory_or_exactly_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    Tracker(Namespace(use_wandb=True), tmp_path / "a").close()
    assert (fake.init_arguments["name"], fake.init_arguments["project"]) == ("a", "miles")
    Tracker(Namespace(use_wandb=True, wandb_group="g", wandb_random_suffix=False), tmp_path / "b").close()
    assert fake.init_arguments["name"] == "g"


def test_without_wandb_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"--use-wandb.*pip install -e '\.\[wandb\]'"):
        Tracker(Namespace(use_wandb=True), tmp_path)


def test_importing_it_loads_no_heavy_library() -> None:
    code = "import miles.utils.tracking, miles.utils.console, miles.utils.run_report, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "ray", "matplotlib", "numpy", "tensorboard", "wandb", "tqdm"} & set(loaded)


@dataclass(frozen=True)
class EvalSet:
    name: str
    path: tuple[str, ...]


def test_run_config_has_flags_versions_and_no_secret(tmp_path: Path) -> None:
    args = Namespace(
        lr=3e-4, wandb_key="secret", eval_datasets=[EvalSet("sort", ("a", "b"))], top=float("inf"), path=tmp_path
    )
    path = write_run_config(args, tmp_path / "new")
    config = json.loads(path.read_text())
    assert path == tmp_path / "new" / "config.json"
    assert config["args"]["lr"] == 3e-4
    assert config["args"]["wandb_key"] == "***"
    assert config["args"]["eval_datasets"] == [{"name": "sort", "path": ["a", "b"]}]
    assert config["args"]["path"] == str(tmp_path) and config["args"]["top"] == "inf"
    assert config["versions"]["numpy"] == np.__version__
    assert config["python"].startswith("3.")


def test_resolved_config_does_not_touch_args() -> None:
    args = Namespace(wandb_key="secret", stop={"b", "a"})
    assert resolved_config(args) == {"stop": ["a", "b"], "wandb_key": "***"}
    assert args.wandb_key == "secret"


def test_the_commit_is_none_outside_a_repository_and_marked_when_dirty(tmp_path: Path) -> None:
    assert git_commit(tmp_path / "missing") is None
    run = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run([*run, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*run, "add", "."], check=True)
    subprocess.run([*run, "commit", "-q", "-m", "One"], check=True)
    clean = git_commit(tmp_path)
    assert clean is not None and len(clean) == 40
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{clean}-dirty"


def test_a_full_disk_names_the_file() -> None:
    sink = JsonLinesSink(Path("/dev/full"))
    for write in (lambda: sink.log({"a": 1.0}, step=0), sink.close):
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            write()
