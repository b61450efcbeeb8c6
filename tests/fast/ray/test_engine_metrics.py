from __future__ import annotations

from miles.ray.engine_metrics import EngineMetrics
from miles.ray.rollout.engine_states import EngineRef, FleetView


def view(serving: int, restarts: int) -> FleetView:
    return FleetView(tuple(EngineRef(i, 1, f"http://{i}") for i in range(serving)), (), restarts)


def test_each_step_has_the_engines_that_serve_and_the_restarts_since_the_last_step() -> None:
    metrics = EngineMetrics(tolerates_faults=True)
    metrics.learn(view(2, 0))
    assert metrics.take() == {"rollout/engines_serving": 2, "rollout/engine_restarts": 0}
    metrics.learn(view(1, 1))
    metrics.learn(view(2, 3))
    assert metrics.take() == {"rollout/engines_serving": 2, "rollout/engine_restarts": 3}
    assert metrics.take() == {"rollout/engines_serving": 2, "rollout/engine_restarts": 0}


def test_without_fault_tolerance_there_are_none() -> None:
    metrics = EngineMetrics(tolerates_faults=False)
    metrics.learn(view(2, 0))
    assert metrics.take() == {}
