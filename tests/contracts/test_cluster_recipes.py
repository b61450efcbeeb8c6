"""The recipes for Ray, Slurm and Kubernetes: readable, and consistent with the launcher that they call."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from examples.fully_async.run_qwen3_30b_a3b_fully_async import parse
from miles.utils.arguments import check_runtime_env
from tests.contracts.gpu_scripts import ROOT, Shims

if TYPE_CHECKING:
    from pathlib import Path

RECIPES = ROOT / "examples" / "cluster"
START_RAY = str(RECIPES / "start-ray.sh")


@pytest.fixture
def shims(tmp_path: Path) -> Shims:
    """`ray`, `srun` and Slurm's `scontrol` write down how they are called; `python` is the real one."""
    directory = tmp_path / "bin"
    directory.mkdir()
    shims = Shims(directory)
    (directory / "python").unlink()
    (directory / "python").symlink_to(sys.executable)
    return shims


class TestStartRay:
    def test_the_head_listens_on_its_own_address(self, shims: Shims) -> None:
        command = shims.last_command_of(["bash", START_RAY, "head"], MILES_HOST_IP="10.0.0.1", NUM_GPUS="8")
        assert command.argv[:2] == ["start", "--head"]
        assert {"--node-ip-address=10.0.0.1", "--port=6379", "--dashboard-port=8265"} <= set(command.argv)
        assert {"--num-gpus=8", "--block"} <= set(command.argv)
        assert command.environment["MILES_HOST_IP"] == "10.0.0.1"

    def test_a_worker_joins_and_knows_its_own_address(self, shims: Shims) -> None:
        command = shims.last_command_of(["bash", START_RAY, "worker"], RAY_HEAD="127.0.0.1", RAY_PORT="7000")
        assert command.argv[:2] == ["start", "--address=127.0.0.1:7000"]
        assert command.environment["MILES_HOST_IP"] == "127.0.0.1"  # the one on the route to the head

    @pytest.mark.parametrize("mode", ["head", "worker"])
    def test_a_users_token_is_shown_by_all_alike(self, mode: str, shims: Shims, tmp_path: Path) -> None:
        """`ray start --head` would turn it on by itself, and the others would be turned away."""
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
        own = {"RAY_HEAD": "127.0.0.1", "HOME": str(tmp_path)}
        assert shims.last_command_of(["bash", START_RAY, mode], **own).environment["RAY_AUTH_MODE"] == "token"
        command = shims.last_command_of(["bash", START_RAY, mode], **own, RAY_AUTH_MODE="disabled")
        assert command.environment["RAY_AUTH_MODE"] == "disabled"

    @pytest.mark.parametrize(
        ("words", "message"),
        [(["worker"], "set RAY_HEAD"), (["wait", "2"], "set RAY_HEAD"), (["stop"], "head, worker or wait, not stop")],
    )
    def test_what_is_missing_is_said(self, words: list[str], message: str, shims: Shims) -> None:
        with pytest.raises(AssertionError, match=message):
            shims.last_command_of(["bash", START_RAY, *words])


class TestSlurm:
    @pytest.fixture
    def calls(self, shims: Shims) -> list[dict[str, Any]]:
        return self.calls_on(shims, nodes=4)

    @staticmethod
    def calls_on(shims: Shims, *, nodes: int, python: str | None = None, **environment: str) -> list[dict[str, Any]]:
        """Every call that the batch script makes, in order, on an allocation of `nodes` nodes."""
        record = shims.directory / "calls.jsonl"
        for name in ("srun", "python"):
            (shims.directory / name).unlink(missing_ok=True)
            (shims.directory / name).symlink_to(shims.directory / "ray")
        if python is not None:
            (shims.directory / "python").unlink()
            (shims.directory / "python").write_text(python)
            (shims.directory / "python").chmod(0o755)
        hosts = shims.directory / "scontrol"
        others = " ".join(f"node{n}" for n in range(2, nodes + 1))
        hosts.write_text(f"#!/usr/bin/env bash\nprintf '%s\\n' {socket.gethostname()} {others}\n")
        addresses = shims.directory / "getent"
        addresses.write_text("#!/usr/bin/env bash\necho '10.0.0.1 STREAM node1'\n")
        for shim in (hosts, addresses):
            shim.chmod(0o755)
        shims.last_command_of(
            ["bash", str(RECIPES / "slurm.sbatch"), "--seed", "7"],
            MODEL="/shared/m",
            DATA="/shared/d",
            OUT=str(shims.directory),
            CHECKOUT=str(ROOT),
            SLURM_JOB_NUM_NODES=str(nodes),
            SLURM_JOB_NODELIST=f"node[1-{nodes}]",
            SLURM_JOB_ID="123456",
            **environment,
        )
        return [json.loads(line) for line in record.read_text().splitlines()]

    def test_it_starts_a_head_and_the_workers_then_the_run(self, calls: list[dict[str, Any]]) -> None:
        sruns = [call["argv"] for call in calls if call["argv"][0].endswith("srun")]
        assert {words[-1] for words in sruns} == {"head", "worker"}
        (workers,) = [words for words in sruns if words[-1] == "worker"]
        assert "--ntasks=3" in workers and f"--exclude={socket.gethostname()}" in workers
        (run,) = [call for call in calls if call["argv"][1].endswith("run_qwen3_30b_a3b_fully_async.py")]
        launch, _, further = parse(run["argv"][2:])
        assert further[-2:] == ["--seed", "7"]
        assert launch.train_nodes * launch.train_gpus_per_node + launch.rollout_gpus == 4 * 8

    def test_everything_shares_one_address_and_one_secret(self, calls: list[dict[str, Any]]) -> None:
        (run,) = [call for call in calls if call["argv"][1].endswith("run_qwen3_30b_a3b_fully_async.py")]
        assert run["environment"]["RAY_ADDRESS"] == f"10.0.0.1:{20000 + 123456 % 5000}"
        tokens = {call["environment"]["RAY_AUTH_TOKEN"] for call in calls}
        assert len(tokens) == 1 and len(tokens.pop()) == 64

    @pytest.mark.parametrize(
        ("nodes", "environment", "sizes"),
        [(2, {}, (1, 8)), (3, {}, (1, 16)), (4, {}, (2, 16)), (4, {"TRAIN_NODES": "3"}, (3, 8))],
    )
    def test_half_of_the_nodes_train(
        self, nodes: int, environment: dict[str, str], sizes: tuple[int, int], shims: Shims
    ) -> None:
        calls = self.calls_on(shims, nodes=nodes, **environment)
        (run,) = [call for call in calls if call["argv"][1].endswith("run_qwen3_30b_a3b_fully_async.py")]
        launch, _, _ = parse(run["argv"][2:])
        assert (launch.train_nodes, launch.rollout_gpus) == sizes

    @pytest.mark.parametrize(("nodes", "environment"), [(1, {}), (2, {"TRAIN_NODES": "2"}), (2, {"TRAIN_NODES": "0"})])
    def test_nodes_that_leave_one_side_without_any_are_refused(
        self, nodes: int, environment: dict[str, str], shims: Shims
    ) -> None:
        with pytest.raises(AssertionError, match="at least one must train and one generate"):
            self.calls_on(shims, nodes=nodes, **environment)

    def test_it_asks_for_time_to_save(self, calls: list[dict[str, Any]]) -> None:
        lines = (RECIPES / "slurm.sbatch").read_text().splitlines()
        settings = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")]
        options = dict(setting.split("=", 1) for setting in settings if "=" in setting)
        assert options["signal"] == "B:USR1@900"
        assert (options["nodes"], options["gpus-per-node"], options["ntasks-per-node"]) == ("4", "8", "1")
        (run,) = [call for call in calls if call["argv"][1].endswith("run_qwen3_30b_a3b_fully_async.py")]
        assert parse(run["argv"][2:])[2][0] == "--save-trigger-sentinel"

    def test_at_the_signal_the_run_saves_first_and_is_then_stopped(self, shims: Shims) -> None:
        """The stand-in of the run signals the script as Slurm does, saves when it is asked to, and waits."""
        order = shims.directory / "order"
        program = f"""#!/usr/bin/env bash
            case "$*" in *run_qwen3_30b*) ;; *) exit 0 ;; esac
            trap 'echo stopped >>{order}; exit 1' TERM
            kill -USR1 $PPID
            until [ -e {shims.directory}/save-now-123456 ]; do sleep 0.05; done
            echo saved >>{order}
            rm {shims.directory}/save-now-123456
            while :; do sleep 0.05; done
        """
        with pytest.raises(AssertionError):  # its status says that it was stopped
            self.calls_on(shims, nodes=2, python=program)
        assert order.read_text().split() == ["saved", "stopped"]


class TestKubernetes:
    @pytest.fixture
    def spec(self) -> dict[str, Any]:
        (document,) = yaml.safe_load_all((RECIPES / "rayjob.yaml").read_text())
        assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayJob")
        return document["spec"]

    @pytest.fixture
    def pods(self, spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
        cluster = spec["rayClusterSpec"]
        groups = {"head": cluster["headGroupSpec"]} | {g["groupName"]: g for g in cluster["workerGroupSpecs"]}
        return {name: group["template"]["spec"] for name, group in groups.items()}

    def test_the_entrypoint_is_what_the_launcher_takes_and_the_nodes_have_the_gpus(self, spec: dict[str, Any]) -> None:
        words = shlex.split(spec["entrypoint"])
        assert words[0] == "python" and words[1].endswith("examples/fully_async/run_qwen3_30b_a3b_fully_async.py")
        launch, _, _ = parse(words[2:])
        (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        gpus = int(limits["nvidia.com/gpu"]) * group["replicas"]
        assert launch.train_nodes * launch.train_gpus_per_node + launch.rollout_gpus == gpus
        assert group["rayStartParams"]["num-gpus"] == limits["nvidia.com/gpu"]
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]

    def test_its_environment_is_the_runs(self, spec: dict[str, Any]) -> None:
        env_vars = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
        assert all(isinstance(value, str) for value in env_vars.values())
        assert "MILES_HOST_IP" not in env_vars
        assert env_vars["RAY_JOB_STOP_WAIT_TIME_S"] == "20", "as in the script"
        check_runtime_env(Namespace(fully_async=True), env_vars)

    def test_each_pod_knows_its_own_address(self, pods: dict[str, dict[str, Any]]) -> None:
        for pod in pods.values():
            (entry,) = [entry for entry in pod["containers"][0]["env"] if entry["name"] == "MILES_HOST_IP"]
            assert entry["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"

    def test_every_pod_sees_the_shared_disk_and_has_shared_memory(self, pods: dict[str, dict[str, Any]]) -> None:
        for pod in pods.values():
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
            assert "persistentVolumeClaim" in volumes[mounts["/shared"]]
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"

    def test_a_failed_run_is_not_started_again_by_itself(self, spec: dict[str, Any]) -> None:
        assert spec["backoffLimit"] == 0 and spec["shutdownAfterJobFinishes"] is True

    def test_the_version_of_ray_is_the_pinned_one(self, spec: dict[str, Any]) -> None:
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        assert f"ray=={spec['rayClusterSpec']['rayVersion']}" in pins
