"""Flags that work, but not with every value. To make a value available, delete its row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.utils.refusals import RefusedValue

if TYPE_CHECKING:
    from collections.abc import Callable


def _only(*allowed: Any) -> Callable[[Any], bool]:
    return lambda given: given in allowed


REFUSED_VALUES: tuple[RefusedValue, ...] = (
    RefusedValue("--train-backend", _only("megatron"), "FSDP is not available", "--train-backend megatron"),
    RefusedValue(
        "--advantage-estimator",
        lambda estimator: estimator != "ppo",
        "it needs a critic, and there is none",
        "grpo, gspo, reinforce_plus_plus or reinforce_plus_plus_baseline",
    ),
    RefusedValue(
        "--update-weight-transfer-mode",
        _only("broadcast", "disk-delta"),
        "weights are not written into an engine's memory",
        "broadcast or disk-delta",
    ),
    RefusedValue("--qkv-format", _only("thd"), "micro batches are packed without padding", "thd"),
    RefusedValue("--megatron-to-hf-mode", _only("raw"), "megatron-bridge is not used", "raw"),
    RefusedValue(
        "--hidden-dropout",
        _only(0.0),
        "dropout would make the trainer's log-probabilities differ from the engine's",
        "0",
    ),
    RefusedValue(
        "--attention-dropout",
        _only(0.0),
        "dropout would make the trainer's log-probabilities differ from the engine's",
        "0",
    ),
)
