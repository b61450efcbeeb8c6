"""A run on a cluster that `ray start` made, as the Ray job that `ray job submit` would make of it.

The cluster says that it has GPUs. Ray counts them and hands them out all the same, so who gets which is real.
"""

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
    """The address of a head node that offers 8 GPUs. It knows nothing of miles."""
    directory = tempfile.mkdtemp(prefix="miles-head-")  # short: unix sockets lie below it
    port = find_available_port(0)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILES_")}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += [
        "--node-ip-address=127.0.0.1",
        "--num-cpus=12",
        "--num-gpus=8",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
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
    run = launcher.run("--num-rollout", "2", "--share-one-gpu")
    assert [step["step"] for step in run.steps()] == [0, 1]
    pids = json.loads((run.run_dir / "processes.json").read_text())
    for name, pid in pids.items():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
            pytest.fail(f"{name} is still there")
    host, port = head.split(":")
    wait_for_server_ready(host, int(port), timeout=5)


PLACE = """
import json, sys
from argparse import Namespace
import ray
from miles.ray.placement_group import create_placement

ray.init(address=sys.argv[1], log_to_driver=False)
args = Namespace(
    actor_num_nodes=1, actor_num_gpus_per_node=6, rollout_num_gpus=2, rollout_num_gpus_per_engine=2, eval_interval=None
)
placement = create_placement(args)

@ray.remote
class Process:
    def gpus(self):
        return ray.get_gpu_ids()

trainers = [Process.options(**placement.trainers.actor_options(rank)).remote() for rank in range(6)]
engine = Process.options(**placement.engines.actor_options(0)).remote()
print(json.dumps(ray.get([actor.gpus.remote() for actor in [*trainers, engine]])))
"""


def test_every_trainer_has_a_gpu_of_its_own_and_an_engine_all_of_its(head: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PLACE, head]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert output.returncode == 0, output.stderr
    *trainers, engine = json.loads(output.stdout.splitlines()[-1])
    assert [len(gpus) for gpus in trainers] == [1] * 6 and len(engine) == 2
    assert len({gpu for gpus in [*trainers, engine] for gpu in gpus}) == 8
