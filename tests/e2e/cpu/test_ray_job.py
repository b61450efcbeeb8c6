"""A run as a Ray job, by the scripts that users call: a cluster of two nodes that wants a token, a tiny model on CPUs.

Needs ray[default], which brings the job server; docs/user-guide/cluster.md says how to run it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from miles.utils.checkpoint_set import newest_readable, rollout_id_of
from miles.utils.network import find_available_port
from tests.e2e.cpu.runs import REPOSITORY, read_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.cpu.runs import Launcher

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("opencensus"), reason="ray[default] is not installed"),
]

EXAMPLES = REPOSITORY / "examples"
LIMIT_SECS = 120
GONE_SECS = 15
TINY = f"""
    --rollout-engine embedded --actor-num-nodes 2 --actor-num-gpus-per-node 1
    --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
    --expert-model-parallel-size 1 --rollout-max-response-len 12 --rollout-skip-special-tokens
    --custom-rm-path tests.e2e.cpu.plugins.scored --rollout-batch-size 4 --n-samples-per-prompt 4
    --global-batch-size 16 --async-max-concurrent-samples 32 --max-tokens-per-gpu 8192
    --update-weight-buffer-size {2**20} --num-rollout 100000
    --custom-megatron-before-train-step-hook-path tests.e2e.cpu.plugins.wait_before_a_step
""".split()


class Cluster:
    """Two nodes that `start-ray.sh` has started, and jobs for them."""

    def __init__(self, launcher: Launcher, directory: Path) -> None:
        self.out = directory / "out"
        self.slow = directory / "slow"
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        data = directory / "data"
        data.mkdir(parents=True)
        prompts = map(json.loads, (launcher.data / "train.jsonl").read_text(encoding="utf-8").splitlines()[:200])
        lines = [{"prompt": [{"role": "user", "content": p["input"]}], "label": p["label"]} for p in prompts]
        (data / "dapo-math-17k.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (data / "template.jinja").write_text("{{ messages[0]['content'] }}")
        port, dashboard = find_available_port(0), find_available_port(0)
        self._address = f"http://127.0.0.2:{dashboard}"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MILES_")},
            **{"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
            **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2, "RAY_HEAD": "127.0.0.2"},
            **{"RAY_PORT": str(port), "DASHBOARD_PORT": str(dashboard), "RAY_JOBS": self._address},
            **{"MODEL": f"{launcher.data}/base_model", "DATA": str(data), "OUT": str(self.out)},
            **{"TRAIN_NODES": "1", "ROLLOUT_NODES": "1", "MILES_TEST_SLOW_STEPS": str(self.slow)},
        }

    def start(self, ray_directory: str) -> None:
        self._start_node("head", "127.0.0.2", f"--temp-dir={ray_directory}")
        self._start_node("worker", "127.0.0.3", "--dashboard-agent-listen-port=0")
        script = [str(EXAMPLES / "cluster" / "start-ray.sh"), "wait", "2"]
        subprocess.run(["bash", *script], env=self._environment, check=True, timeout=LIMIT_SECS)

    def _start_node(self, role: str, address: str, *flags: str) -> None:
        log = self._directory / f"{role}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", str(EXAMPLES / "cluster" / "start-ray.sh"), role, "--num-cpus=2", *flags],
                env={**self._environment, "MILES_HOST_IP": address},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes.append(process)
        wait_until(lambda: "will now block" in log.read_text(errors="replace"), log)

    def submit(self) -> Job:
        log = self._directory / f"job-{len(self._processes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *("bash", str(EXAMPLES / "fully_async" / "ray-job-qwen3-30b-a3b.sh"), *TINY),
                    *("--chat-template-path", f"{self._environment['DATA']}/template.jinja"),
                ],
                cwd=self._directory,
                env=self._environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes.append(process)
        return Job(process, log, self.out)

    def ray(self, *words: str) -> str:
        command = [str(Path(sys.executable).with_name("ray")), *words, "--address", self._address]
        return subprocess.run(
            command, env=self._environment, check=True, timeout=LIMIT_SECS, capture_output=True, text=True
        ).stdout

    def stop(self) -> None:
        for process in reversed(self._processes):
            try:
                started = psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                started = []
            for one in (process, *started):
                one.send_signal(signal.SIGKILL)
            process.wait()


class Job:
    def __init__(self, process: subprocess.Popen[bytes], log: Path, out: Path) -> None:
        self._process = process
        self._out = out
        self._log = log
        self._former = set(self._runs())

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def id(self) -> str:
        found = re.search(r"raysubmit_\w+", self.output)
        assert found
        return found.group()

    @property
    def run_dir(self) -> Path:
        (run_dir,) = set(self._runs()) - self._former
        return run_dir

    def wait_for_steps(self, count: int) -> None:
        wait_until(lambda: any(set(self._runs()) - self._former) and self._steps() >= count, self._log)

    def pids(self) -> dict[str, int]:
        pids: dict[str, int] = json.loads((self.run_dir / "processes.json").read_text())
        return pids

    def wait(self) -> int:
        return self._process.wait(LIMIT_SECS)

    def survivors(self) -> list[str]:
        """Names of processes of the run that still live after a while."""
        deadline = time.monotonic() + GONE_SECS
        while (left := [name for name, pid in self.pids().items() if psutil.pid_exists(pid)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.1)
        return left

    def _runs(self) -> list[Path]:
        return list(self._out.glob("20*"))

    def _steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return len(read_steps(self.run_dir)) if path.exists() else 0


def wait_until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + LIMIT_SECS
    while not condition():
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(launcher, tmp_path_factory.mktemp("cluster"))
    ray_directory = tempfile.mkdtemp(prefix="ray-")  # its sockets' paths must be short
    try:
        cluster.start(ray_directory)
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(ray_directory, ignore_errors=True)


def test_a_job_that_is_stopped_finishes_its_step_and_saves_it(cluster: Cluster) -> None:
    job = cluster.submit()
    job.wait_for_steps(2)
    cluster.slow.touch()
    wait_until(lambda: cluster.slow.read_text() != "", cluster.slow)  # one longer than Ray's own patience has begun
    cluster.ray("job", "stop", job.id)
    job.wait()
    assert "STOPPED" in cluster.ray("job", "list")
    assert "miles: stopped" in job.output and "SIGTERM received" not in job.output
    newest = newest_readable(cluster.out / "qwen3-30b-a3b-fully-async")
    assert newest is not None and rollout_id_of(newest.name) >= 2, "the slow one is none of the first two"
    assert job.survivors() == []


def test_a_job_fails_with_the_run_and_leaves_nothing(cluster: Cluster) -> None:
    cluster.slow.unlink(missing_ok=True)
    job = cluster.submit()
    job.wait_for_steps(1)
    os.kill(job.pids()["engine-0"], signal.SIGKILL)
    assert job.wait() == 1
    assert "exit code 1" in job.output and re.search(r"miles: engine-0 .* was killed by SIGKILL", job.output)
    assert job.survivors() == []
