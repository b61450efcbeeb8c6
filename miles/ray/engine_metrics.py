"""How many engines serve, and how many were replaced, for each step's record."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles.ray.rollout.engine_states import FleetView


class EngineMetrics:
    """There are some only where faults are tolerated; then in every step."""

    def __init__(self, *, tolerates_faults: bool) -> None:
        self._tolerates_faults = tolerates_faults
        self._serving = 0
        self._restarts = 0
        self._reported = 0

    def learn(self, view: FleetView) -> None:
        self._serving, self._restarts = len(view.serving), view.restarts

    def take(self) -> dict[str, float]:
        """`rollout/engines_serving` now, and `rollout/engine_restarts` since the last call."""
        if not self._tolerates_faults:
            return {}
        restarts, self._reported = self._restarts - self._reported, self._restarts
        return {"rollout/engines_serving": self._serving, "rollout/engine_restarts": restarts}
