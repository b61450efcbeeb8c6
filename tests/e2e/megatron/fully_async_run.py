"""Three fully asynchronous rollouts of a mixture-of-experts model, at any scale: eight GPUs, or a CPU.

    rollout 0   cold start: nothing is finished yet, everything is written by the first weights
    rollout 1   drained from a warm queue: no weight update lies between
    rollout 2   drained across a weight update: what is drained was begun under the weights before it

`flags(scale, ...)` is the one configuration; a `Scale` holds what differs. `check` holds the gates.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ROLLOUTS = 3


@dataclass(frozen=True)
class Parallelism:
    """How the trainer's ranks share the model."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1


@dataclass(frozen=True)
class Gates:
    """What every rollout must keep within."""

    grad_norm: float
    """Upper bound; it must also be above 0."""
    ppo_kl: float
    """Bound of its absolute value: how far the second optimizer step of a rollout is from the first."""
    log_prob_diff: float
    """Upper bound of train/train_rollout_logprob_abs_diff where the trainer still has the weights that wrote it."""
    log_prob_diff_moved_on: float
    """The same where it has learned since."""
    reward: tuple[float, float]
    """Bounds of the mean reward."""


@dataclass(frozen=True)
class Scale:
    """What differs between eight GPUs and a CPU. The rest is the same, so that one shows the other's mistakes."""

    trainers: int
    parallelism: Parallelism
    rollout_gpus: int
    gpus_per_engine: int
    rollout_batch_size: int
    samples_per_prompt: int
    max_response_len: int
    max_tokens_per_gpu: int
    learning_rate: float
    gates: Gates
    reward: Sequence[str]
    """Flags of prompts and reward."""
    engine: Sequence[str]
    """Flags of the engine."""
    trainer: Sequence[str] = field(default=())
    """Further flags of the trainer: precision, memory."""


H100 = Scale(
    trainers=6,
    parallelism=Parallelism(tensor=1, pipeline=3, context=2, expert=2),
    rollout_gpus=2,
    gpus_per_engine=2,
    rollout_batch_size=16,
    samples_per_prompt=8,
    max_response_len=2048,
    max_tokens_per_gpu=2048,
    learning_rate=1e-6,
    gates=Gates(
        grad_norm=10.0,
        ppo_kl=0.02,
        log_prob_diff=0.05,
        log_prob_diff_moved_on=0.1,
        reward=(0.2, 1.0),
    ),
    reward=(
        *("--rm-type", "math", "--apply-chat-template"),
        *("--apply-chat-template-kwargs", '{"enable_thinking": false}'),
    ),
    engine=(
        *("--rollout-engine", "sglang", "--sglang-mem-fraction-static", "0.8"),
        *("--sglang-max-running-requests", "256", "--sglang-server-concurrency", "256"),
    ),
    trainer=(
        *("--bf16", "--accumulate-allreduce-grads-in-fp32"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        # The optimizer lies in host memory: beside weights and gradients it would not fit.
        *("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer"),
        *("--moe-token-dispatcher-type", "alltoall", "--update-weight-buffer-size", str(1024**3)),
    ),
)


def flags(scale: Scale, *, checkpoint: Path, prompts: Path, runs_dir: Path) -> list[str]:
    """The arguments of train_async.py."""
    samples = scale.rollout_batch_size * scale.samples_per_prompt
    parallelism = scale.parallelism
    return [
        "--fully-async",
        *("--hf-checkpoint", str(checkpoint), "--runs-dir", str(runs_dir)),
        *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", str(scale.trainers)),
        *("--rollout-num-gpus", str(scale.rollout_gpus)),
        *("--rollout-num-gpus-per-engine", str(scale.gpus_per_engine)),
        *("--tensor-model-parallel-size", str(parallelism.tensor)),
        *("--pipeline-model-parallel-size", str(parallelism.pipeline)),
        *("--context-parallel-size", str(parallelism.context)),
        *("--expert-model-parallel-size", str(parallelism.expert)),
        *("--expert-tensor-parallel-size", "1"),
        *scale.trainer,
        *scale.engine,
        *("--prompt-data", str(prompts), "--input-key", "input", "--label-key", "label", "--rollout-shuffle"),
        *scale.reward,
        *("--num-rollout", str(ROLLOUTS)),
        *("--rollout-batch-size", str(scale.rollout_batch_size)),
        *("--n-samples-per-prompt", str(scale.samples_per_prompt)),
        *("--rollout-max-response-len", str(scale.max_response_len), "--rollout-temperature", "1"),
        # Two batches in flight and one waiting: what rollout 2 drains was begun before the update.
        *("--async-max-concurrent-samples", str(2 * samples), "--async-data-buffer-capacity-factor", "1"),
        *("--max-weight-staleness", "4", "--pause-generation-mode", "retract"),
        *("--update-weights-interval", "2", "--update-weight-transfer-mode", "broadcast"),
        *("--no-progress-timeout", "900"),
        # Two optimizer steps a rollout: the second one's ppo_kl is not 0 by construction.
        *("--global-batch-size", str(samples // 2)),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", str(scale.max_tokens_per_gpu)),
        *("--advantage-estimator", "grpo", "--eps-clip", "0.2", "--eps-clip-high", "0.28"),
        *("--use-tis", "--tis-clip", "2"),
        *("--optimizer", "adam", "--lr", str(scale.learning_rate), "--lr-decay-style", "constant"),
        *("--weight-decay", "0", "--clip-grad", "1"),
    ]


def check(steps: list[dict[str, Any]], scale: Scale) -> None:
    """Assert what the three rollouts are, and that each keeps within the gates. `steps`: their records, in order."""
    assert [step["step"] for step in steps] == [0, 1, 2]
    cold, warm, across = steps
    prefix = "rollout/fully_async/"
    assert cold[prefix + "trained_max_staleness"] == 0
    assert warm[prefix + "trained_max_staleness"] == 0
    assert across[prefix + "trained_max_staleness"] >= 1
    # The worker went on during the first training step: the second rollout found groups that were finished already.
    assert warm[prefix + "consumer_wait_seconds"] < cold[prefix + "consumer_wait_seconds"]
    missed = []
    for step in steps:
        assert step["rollout/num_groups"] == scale.rollout_batch_size
        missed += gates_missed(step, scale.gates, moved_on=step is not cold)
    assert not missed, "\n".join(missed)


def gates_missed(step: dict[str, Any], gates: Gates, *, moved_on: bool) -> list[str]:
    """The gates that this rollout misses, each with the value; none where all is well.

    `moved_on`: the trainer has learned since the engines got the weights that wrote the rollout.
    """
    limit = gates.log_prob_diff_moved_on if moved_on else gates.log_prob_diff
    bounds = {
        "train/grad_norm": (0.0, gates.grad_norm),
        "train/ppo_kl": (-gates.ppo_kl, gates.ppo_kl),
        "train/train_rollout_logprob_abs_diff": (0.0, limit),
        "rollout/raw_reward": gates.reward,
    }
    missed = []
    for key, (low, high) in bounds.items():
        value = step[key]
        if not (math.isfinite(value) and low <= value <= high) or (key == "train/grad_norm" and value == 0):
            missed.append(f"step {step['step']}: {key} is {value}, wanted {low} to {high}")
    return missed


def write_arithmetic(path: Path, *, count: int, as_messages: bool, seed: int = 7) -> Path:
    """Products of one to five digits by one to five: for a large model neither all right nor all wrong."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for digits in (rng.randint(1, 5), rng.randint(1, 5)))
            question = f"What is {a} x {b}? Put the number into \\boxed{{}}."
            prompt = [{"role": "user", "content": question}] if as_messages else question
            file.write(json.dumps({"input": prompt, "label": str(a * b)}) + "\n")
    return path
