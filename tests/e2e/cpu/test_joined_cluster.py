"""A run on a cluster that `ray start` made, as the Ray job that `ray job submit` would make of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from miles.utils.network import find_available_port, wait_for_server_ready

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.cpu.runs import Launcher

pytestmark = [pytest.mark.timeout(200), getattr(pytest.mark, "stage-a-cpu")]

VARIABLE = "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR"


@pytest.fixture
def head() -> Iterator[str]:
    """The address of a head node with room for a run. It knows nothing of miles."""
    directory = tempfile.mkdtemp(prefix="miles-head-")  # short: unix sockets lie below it
    port = find_available_port(0)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILES_")}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--node-ip-address=127.0.0.1", "--num-cpus=4", "--include-dashboard=false", "--disable-usage-stats"]
    process = subprocess.Popen(
        [*command, f"--temp-dir={directory}"],
        cwd=directory,
        env={**environment, "RAY_AUTH_MODE": "disabled"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_server_ready("127.0.0.1", port, process, timeout=60)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def test_a_ray_job_runs_and_leaves_the_cluster_as_it_was(
    head: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    env_vars = {VARIABLE: "1", "PYTHONPATH": os.getcwd()}
    monkeypatch.setenv("RAY_ADDRESS", head)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv(
        "RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"env_vars": env_vars}, "metadata": {}})
    )
    run = launcher.run("--num-rollout", "2")
    assert [step["step"] for step in run.steps()] == [0, 1]
    pids = json.loads((run.run_dir / "processes.json").read_text())
    for name, pid in pids.items():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
            pytest.fail(f"{name} is still there")
    host, port = head.split(":")
    wait_for_server_ready(host, int(port), timeout=5)
