"""Starts `train_async.py` and `train.py` as a user would, and reads what the run left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REPOSITORY = Path(__file__).resolve().parents[3]
TIMEOUT_SECS = 150
POLL_SECS = 0.05


@dataclass
class FinishedRun:
    """What a run printed and wrote."""

    run_dir: Path
    exit_code: int
    output: str

    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each step, in order."""
        return read_steps(self.run_dir)

    def evaluations(self) -> list[dict[str, Any]]:
        """The records that hold an evaluation or say why there is none, in the order in which they were logged."""
        records = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [record for record in records if "eval/weight_version" in record]

    def records(self, key: str) -> list[dict[str, Any]]:
        """The records that have this key; none where nothing was logged."""
        path = self.run_dir / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [record for record in records if key in record]

    def sum_of(self, metric: str) -> float:
        return sum(step[metric] for step in self.steps())


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "perf/step_time" in record]


class RunningRun:
    """A run that is under way. `finish` must be called."""

    def __init__(self, process: subprocess.Popen[str], runs_dir: Path, timeout_secs: float = TIMEOUT_SECS) -> None:
        self._process = process
        self._timeout_secs = timeout_secs
        self._runs_dir = runs_dir
        self._seen: set[psutil.Process] = set()

    @property
    def run_dir(self) -> Path:
        (run_dir,) = self._runs_dir.iterdir()
        return run_dir

    def wait_for_steps(self, count: int) -> None:
        """Until `count` steps are logged."""
        self.wait_until(lambda: len((self.run_dir / "metrics.jsonl").read_text().splitlines()) >= count)

    def wait_for_steps_where(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Until the steps so far fulfil the condition together."""
        self.wait_until(lambda: condition(read_steps(self.run_dir)))

    def wait_for_step_where(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Until a step is logged that fulfils the condition."""
        self.wait_until(lambda: any(condition(step) for step in read_steps(self.run_dir)))

    def pids(self) -> dict[str, int]:
        """Process ids by name, once the run has told them."""
        self.wait_until(lambda: (self.run_dir / "processes.json").exists())
        pids: dict[str, int] = json.loads((self.run_dir / "processes.json").read_text())
        return pids

    def remember_processes(self) -> set[psutil.Process]:
        """Note every process of the run that is alive now, for `survivors`, and return them."""
        driver = psutil.Process(self._process.pid)
        alive = {driver, *driver.children(recursive=True)}
        self._seen |= alive
        return alive

    def survivors(self, timeout_secs: float) -> list[psutil.Process]:
        """Remembered processes that still run after at most `timeout_secs`."""
        _, alive = psutil.wait_procs(self._seen, timeout=timeout_secs)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def send(self, signum: int) -> None:
        self._process.send_signal(signum)

    def is_alive(self) -> bool:
        """Whether the driver runs."""
        return self._process.poll() is None

    def end(self) -> None:
        """Kill what is left of the run, after a failed test."""
        if self.is_alive():
            self.remember_processes()
            for process in self._seen:
                if process.is_running():
                    process.send_signal(signal.SIGKILL)
            self.reap()

    def reap(self) -> None:
        """Collect the driver after it was killed, without reading what it printed."""
        self._process.wait(timeout=10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def finish(self, timeout_secs: float | None = None) -> FinishedRun:
        """Wait for the end; the run is killed where it takes longer."""
        timeout_secs = self._timeout_secs if timeout_secs is None else timeout_secs
        try:
            output, _ = self._process.communicate(timeout=timeout_secs)
        except subprocess.TimeoutExpired:
            self.remember_processes()
            for process in self._seen:
                process.send_signal(signal.SIGKILL)
            output, _ = self._process.communicate()
            raise AssertionError(f"the run did not end within {timeout_secs} s; it printed:\n{output}") from None
        run_dirs = list(self._runs_dir.iterdir()) if self._runs_dir.exists() else []
        return FinishedRun(run_dirs[0] if run_dirs else self._runs_dir, self._process.returncode, output)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_secs
        while True:
            try:
                if condition():
                    return
            except (FileNotFoundError, ValueError):  # not written yet
                pass
            if self._process.poll() is not None:
                raise AssertionError(f"the run ended early and printed:\n{self._process.communicate()[0]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not reached within {self._timeout_secs} s")
            time.sleep(POLL_SECS)


class Launcher:
    """Starts runs that differ in a few flags. Small batches: 4 prompts of 4 samples."""

    def __init__(self, root: Path, data: Path, timeout_secs: float = TIMEOUT_SECS) -> None:
        self.root = root
        self._timeout_secs = timeout_secs
        self.data = data
        self._count = 0

    def start(
        self,
        *flags: str,
        driver: str = "train_async.py",
        fully_async: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> RunningRun:
        mode = ["--fully-async"] if fully_async else []
        return self.start_as(
            lambda runs_dir: [*mode, *self.flags(runs_dir), *flags], driver=driver, environment=environment
        )

    def start_as(
        self,
        flags_of: Callable[[Path], list[str]],
        *,
        driver: str = "train_async.py",
        environment: Mapping[str, str] | None = None,
    ) -> RunningRun:
        """Start a run with flags of its own: `flags_of(directory for the run's directory)`; `environment` adds to
        that of the driver."""
        self._count += 1
        runs_dir = self.root / f"runs-{self._count}"
        command = [sys.executable, driver, *flags_of(runs_dir)]
        own = {"MILES_EXPERIMENTAL_ROLLOUT_REFACTOR": "1", "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **own, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return RunningRun(process, runs_dir, self._timeout_secs)

    def run(self, *flags: str, driver: str = "train_async.py", fully_async: bool = True) -> FinishedRun:
        """A whole run; fails the test where it fails."""
        finished = self.start(*flags, driver=driver, fully_async=fully_async).finish()
        assert finished.exit_code == 0, finished.output
        return finished

    def flags(self, runs_dir: Path) -> list[str]:
        data = self.data
        return f"""
            --hf-checkpoint {data}/base_model --rollout-engine embedded --runs-dir {runs_dir}
            --actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1
            --prompt-data {data}/train.jsonl --input-key input --label-key label --rollout-shuffle
            --custom-rm-path examples.quickstart.reward.reward
            --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 16
            --rollout-max-response-len 12 --rollout-skip-special-tokens --use-tis
            --use-dynamic-batch-size --max-tokens-per-gpu 8192
            --optimizer adam --lr 3e-4 --lr-decay-style constant --weight-decay 0
        """.split()
