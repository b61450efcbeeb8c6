"""What passes between the driver and whoever evaluates."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Weights:
    """Which weights a snapshot holds: the trainer's, `steps_after` training steps after it published `version`.

    With --update-weights-interval above 1 the trainer is ahead of what it has published.
    """

    version: int
    steps_after: int = 0

    @property
    def label(self) -> str:
        """`7`, or `7+2` for weights that no version names."""
        return f"{self.version}+{self.steps_after}" if self.steps_after else str(self.version)


@dataclass(frozen=True)
class EvalOutcome:
    """How one evaluation ended: with metrics, or with the reason why there are none."""

    metrics: dict[str, float] = field(default_factory=dict)
    skipped: str | None = None  # the <reason> of eval/skipped_<reason>
    message: str = ""
    started: float = 0.0  # seconds since the epoch
    ended: float = 0.0


@dataclass(frozen=True)
class EvalPoint:
    """One point of the evaluation curves, ready to be logged at the step that it belongs to."""

    rollout_id: int
    weights: Weights
    metrics: dict[str, float]
    outcome: EvalOutcome
    steps_trained: int  # that the weights have had: rollout_id + 1, or 0 before the first one
