"""The Ray cluster of a run: a private one on this machine, or an existing one by address."""

from __future__ import annotations

import json
import logging
import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker

from miles.ray.ray_processes import own_ray_processes
from miles.ray.rollout.engine_size import EngineSize
from miles.ray.temporary import OwnedDirectory
from miles.ray.token_auth import show_token_to_ray
from miles.rollout.eval_flags import eval_way
from miles.utils.arguments import check_runtime_env
from miles.utils.process_state import kill_left

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

_RUN_ENVIRONMENT = ("MILES_EXPERIMENTAL_ROLLOUT_REFACTOR", "MILES_PREFER_IPV6")
# Each machine has its own: where others have a part in the run, it comes from what `ray start` had there.
_MACHINE_ENVIRONMENT = ("MILES_HOST_IP",)
# What `ray job submit` gives to the driver: a JSON object with the job's runtime_env in it.
_JOB_CONFIG_ENV = "RAY_JOB_CONFIG_JSON_ENV_VAR"

# Ray turns 127.0.0.1 into the machine's address on its network, which may change or go away during a run. Any other
# loopback address it leaves alone.
_RAY_ADDRESS_ON_LOOPBACK = "127.0.0.2"


class RayCluster:
    """Connects to Ray for the length of a run.

    Where the environment names a cluster (`RAY_ADDRESS`, as `ray job submit` sets it) that one is joined: processes
    have the environment of their machine's `ray start`, and over it the variables of the job and of the run.

    Otherwise a private one is started, in a directory of its own, with enough *logical* CPUs for every actor: actors
    share cores, so a run starts on a single one. Its processes address each other on loopback, but Ray's control ports
    listen on every interface; what keeps strangers out is the run's token.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        engines = EngineSize.from_args(args).num_bundles + EngineSize.of_evaluation(args).num_bundles
        self._num_actors = num_trainers(args) + engines + num_managers(args)
        self._directory: OwnedDirectory | None = None

    def connect(self) -> None:
        """Start or join the cluster. Takes some seconds."""
        _send_raylet_messages_to_the_log()
        joins_existing = bool(os.environ.get("RAY_ADDRESS"))
        if not joins_existing:
            os.environ.setdefault("MILES_HOST_IP", "127.0.0.1")
        job = job_env_vars()
        own = run_env_vars(joins_existing=joins_existing)
        check_runtime_env(self._args, {**own, **job})
        # Ray adds the job's variables itself, and refuses to start where one is given twice.
        env_vars = {name: value for name, value in own.items() if name not in job}
        options = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": {"env_vars": env_vars}}
        if joins_existing:
            show_token_to_ray()
            with _our_signal_handlers():
                ray.init(**options)
            return
        # Unix sockets live below this directory and their paths may have 107 characters at most: keep it short.
        self._directory = OwnedDirectory("miles-ray-")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with _our_signal_handlers():
            ray.init(
                **options,
                address="local",
                num_cpus=max(os.cpu_count() or 1, self._num_actors),
                include_dashboard=False,
                _temp_dir=str(self._directory.path),
                _node_ip_address=_RAY_ADDRESS_ON_LOOPBACK,
            )

    def disconnect(self) -> None:
        """Leave the cluster; a private one ends with all its processes, and its directory goes."""
        processes = own_ray_processes()
        children = [child for process in processes for child in process.children()]
        for process in processes:
            process.kill_if_stopped()
        ray.shutdown()
        kill_left(children)
        if self._directory is not None:
            self._directory.remove()


@contextmanager
def _our_signal_handlers() -> Iterator[None]:
    """Keep Ray from taking over SIGTERM in the driver: its handler exits without a word, and without our clean-up."""
    original = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = original


def _send_raylet_messages_to_the_log() -> None:
    """Ray prints what its raylet says about a dead worker between our own lines; the supervisor tells it better."""
    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = lambda data, ignore_prefix: logger.info("raylet: %s", data["lines"])


def run_env_vars(*, joins_existing: bool) -> dict[str, str]:
    """The environment that every actor of the run must see, whichever machine it is on."""
    names = _RUN_ENVIRONMENT if joins_existing else _RUN_ENVIRONMENT + _MACHINE_ENVIRONMENT
    return {name: os.environ[name] for name in names if name in os.environ}


def job_env_vars() -> dict[str, str]:
    """The environment variables of the Ray job that this driver is, from its runtime_env; none where it is not one."""
    job = json.loads(os.environ.get(_JOB_CONFIG_ENV) or "{}")
    env_vars: dict[str, str] = (job.get("runtime_env") or {}).get("env_vars") or {}
    return env_vars


def num_engines(args: Namespace) -> int:
    """Engines that generate for training, external ones included."""
    return int(args.rollout_num_gpus) // int(args.rollout_num_gpus_per_engine)


def num_managers(args: Namespace) -> int:
    """The actors that hold no GPU: the rollout manager, and the evaluation manager where snapshots are evaluated."""
    return 2 if eval_way(args).uses_snapshots else 1


def num_trainers(args: Namespace) -> int:
    return int(args.actor_num_nodes) * int(args.actor_num_gpus_per_node)
