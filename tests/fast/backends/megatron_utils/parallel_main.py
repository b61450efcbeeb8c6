"""One trainer rank of a world that goes through a list of jobs: `python -m ... RANK WORLD_SIZE JOBS OUT`.

A job is a checkpoint, flags and rollouts; its result is what all layouts must agree on. Importing megatron-core takes
seconds, so one world goes through all layouts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from miles.utils.network import find_available_port
from tests.fast.backends.megatron_utils.tiny_models import make_args, make_shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miles.backends.megatron_utils.trainer import MegatronTrainer

ROOT = Path(__file__).parents[4]


@dataclass(frozen=True)
class Job:
    """What one trainer does between its start and its end."""

    name: str
    checkpoint: str
    flags: dict[str, Any] = field(default_factory=dict)
    rollouts: tuple[int, ...] = (0, 1)
    resume: bool = False
    save: bool = False
    """Save behind the last rollout."""
    port: int = 0


def spread_of_logits(args: Any, batch: Any, logits: torch.Tensor, reduce: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """A loss function of the user's: it sees the logits of the whole vocabulary."""
    ends = torch.tensor(batch["total_lengths"]).cumsum(0).tolist()
    spread = logits.float().var(dim=-1)
    rows = [spread[end - length - 1 : end - 1] for end, length in zip(ends, batch["response_lengths"], strict=True)]
    loss = reduce(torch.cat(rows))
    return loss, {"spread": loss}


def share(shard: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Every `size`-th sample; the batch-wide number stays."""
    return {key: value[rank::size] if isinstance(value, list) else value for key, value in shard.items()}


@contextmanager
def trainer_for(job: Job, rank: int, world_size: int) -> Iterator[MegatronTrainer]:
    from miles.backends.megatron_utils.trainer import MegatronTrainer

    values = {"lr": 1e-3, "adam_eps": 1e-5, "micro_batch_size": 2, **job.flags}
    args = make_args(Path(job.checkpoint), **values)
    port = job.port or find_available_port()
    trainer = MegatronTrainer(args, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port)
    try:
        yield trainer
    finally:
        trainer.close()


def run(job: Job, *, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Train the job's rollouts; the numbers to compare. Weights are on rank 0 only."""
    with trainer_for(job, rank, world_size) as trainer:
        if job.resume:
            assert trainer.load() == job.rollouts[0]
        metrics = []
        for rollout in job.rollouts:
            shard = make_shard(seed=rollout)
            metrics.append(trainer.train(rollout, share(shard, trainer.dp_rank, trainer.dp_size)))
        if job.save:
            trainer.save(job.rollouts[-1])
        weights = {name: tensor.cpu().clone() for name, tensor in trainer.hf_named_tensors()}
    return {"metrics": metrics, "weights": weights}


def agree_on_port(file: Path, rank: int) -> int:
    """Where rank 0 meets the others, chosen when it is about to listen: a port that is free now may not be so later."""
    if rank == 0:
        part = file.with_suffix(".part")
        part.write_text(str(find_available_port()), encoding="utf-8")
        part.rename(file)
    while not file.is_file():
        time.sleep(0.01)
    return int(file.read_text(encoding="utf-8"))


def run_world(
    jobs: Sequence[Job], world_size: int, directory: Path, timeout: float = 240, *, main: str = "parallel_main"
) -> list[dict[str, Any]]:
    """Per rank {job: result} of a world that goes through `jobs`, in processes of its own."""
    (directory / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")
    outputs = [directory / f"rank-{rank}.pt" for rank in range(world_size)]
    module = f"tests.fast.backends.megatron_utils.{main}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(world_size), str(directory / "jobs.json"), str(out)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, out in enumerate(outputs)
    ]
    try:
        logs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(logs)
    return [torch.load(out, weights_only=True) for out in outputs]


def assert_equal(found: dict[str, Any], expected: dict[str, Any], where: Any, tolerance: float = 1e-5) -> None:
    for want, got in zip(expected["metrics"], found["metrics"], strict=True):
        # Experts have parameter groups, and so learning rates, of their own.
        names = {key for key in want if not key.startswith(("perf/", "train/lr-pg_"))}
        assert names <= got.keys(), where
        for key in names:
            assert got[key] == pytest.approx(want[key], abs=tolerance), (where, key)
    if not found["weights"]:
        return
    assert found["weights"].keys() == expected["weights"].keys(), where
    for key, tensor in expected["weights"].items():
        difference = (found["weights"][key] - tensor).abs().max().item()
        assert difference <= tolerance, (where, key, difference)


def run_rank() -> None:
    """What a process of a world does; its command line says which."""
    rank, world_size, jobs_file, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    jobs = [Job(**values) for values in json.loads(Path(jobs_file).read_text(encoding="utf-8"))]
    results = {}
    for number, job in enumerate(jobs):
        port = agree_on_port(Path(jobs_file).with_name(f"port-{number}"), rank)
        results[job.name] = run(replace(job, port=port), rank=rank, world_size=world_size)
    torch.save(results, out)


if __name__ == "__main__":
    run_rank()
