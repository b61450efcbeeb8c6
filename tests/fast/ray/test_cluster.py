"""Joining a cluster: whose environment the run's processes get."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import pytest

from miles.ray import cluster

VARIABLE = "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR"


@pytest.fixture
def args() -> Namespace:
    return Namespace(
        fully_async=True,
        actor_num_nodes=1,
        actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        eval_interval=None,
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Ray is started with; nothing is."""
    options: dict[str, Any] = {}
    monkeypatch.setattr(cluster.ray, "init", lambda **given: options.update(given))
    for name in ("RAY_ADDRESS", "MILES_HOST_IP", "RAY_AUTH_TOKEN", cluster._JOB_CONFIG_ENV, VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # whatever token the user has
    return options


def as_ray_job(monkeypatch: pytest.MonkeyPatch, env_vars: dict[str, str]) -> None:
    """As `ray job submit` starts a driver: with its variables, and with a note of which those are."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv(cluster._JOB_CONFIG_ENV, json.dumps({"runtime_env": {"env_vars": env_vars}, "metadata": {}}))
    for name, value in env_vars.items():
        monkeypatch.setenv(name, value)


def test_a_private_cluster_passes_the_runs_environment_on(
    args: Namespace, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    connected = cluster.RayCluster(args)
    connected.connect()
    connected.disconnect()
    assert started["address"] == "local"
    assert started["runtime_env"] == {"env_vars": {VARIABLE: "1", "MILES_HOST_IP": "127.0.0.1"}}


def test_a_joined_cluster_leaves_each_machine_its_own_address(
    args: Namespace, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("MILES_HOST_IP", "10.0.0.1")
    cluster.RayCluster(args).connect()
    assert "address" not in started  # Ray reads it from the environment
    assert started["runtime_env"] == {"env_vars": {VARIABLE: "1"}}


def test_a_ray_job_does_not_give_a_variable_twice(
    args: Namespace, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_ray_job(monkeypatch, {VARIABLE: "1", "PYTHONPATH": "/shared/miles"})
    monkeypatch.setenv("MILES_PREFER_IPV6", "1")
    cluster.RayCluster(args).connect()
    assert started["runtime_env"] == {"env_vars": {"MILES_PREFER_IPV6": "1"}}
    merged = cluster.ray.runtime_env.runtime_env._merge_runtime_env(
        {"env_vars": cluster.job_env_vars()}, started["runtime_env"]
    )
    assert merged is not None, "Ray refuses these two together"


def test_a_ray_job_whose_workers_lack_the_variable_is_refused(
    args: Namespace, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_ray_job(monkeypatch, {VARIABLE: "0"})
    with pytest.raises(ValueError, match=f"{VARIABLE}=1 in Ray's workers too, and runtime_env lacks it"):
        cluster.RayCluster(args).connect()
    assert started == {}


def test_a_ray_job_may_have_no_variables_at_all(
    args: Namespace, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv(cluster._JOB_CONFIG_ENV, '{"runtime_env": null, "metadata": {}}')
    cluster.RayCluster(args).connect()
    assert started["runtime_env"] == {"env_vars": {VARIABLE: "1"}}


def test_who_joins_follows_the_rule_of_tokens_before_it_connects(
    args: Namespace, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv(VARIABLE, "1")
    seen: list[bool] = []
    monkeypatch.setattr(cluster, "show_token_to_ray", lambda: seen.append(bool(started)))
    cluster.RayCluster(args).connect()
    assert seen == [False] and started
