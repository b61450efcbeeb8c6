"""One trainer rank in a Ray actor. It runs one call at a time on the actor's main thread, as megatron-core expects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from miles.backends.sglang_utils.launch import nccl_environment
from miles.ray.own_gpus import see_own_gpus_only
from miles.utils.heartbeat import start_heart
from miles.utils.http_utils import find_available_port, get_host_info
from miles.utils.logging_utils import redirect_output

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.ray.rollout.rollout_manager import Box
    from miles.utils.heartbeat import Heart


class TrainActor:
    """A thin shell around `MegatronTrainer`: fetches its shard of each batch, and hands everything else through."""

    def __init__(self, args: Namespace, rank: int, world_size: int) -> None:
        redirect_output(Path(args.run_dir) / "logs" / f"trainer-{rank}.log")
        see_own_gpus_only()
        for name, value in nccl_environment(args).items():
            os.environ.setdefault(name, value)
        self._args = args
        self._rank = rank
        self._world_size = world_size

    def rendezvous_address(self) -> tuple[str, int]:
        """Where rank 0 can host the store of the default process group."""
        return get_host_info()[1], find_available_port(0)

    def init(self, master_addr: str, master_port: int, checkpoint: str | None) -> int:
        """Build the trainer, load this checkpoint set (None: the initial weights), and return the rollout id to start
        with."""
        from miles.backends.megatron_utils.trainer import MegatronTrainer

        self._trainer = MegatronTrainer(
            self._args,
            rank=self._rank,
            world_size=self._world_size,
            master_addr=master_addr,
            master_port=master_port,
        )
        return self._trainer.load(checkpoint)

    def train(self, rollout_id: int, data_ref: list[Box]) -> dict[str, float]:
        """Train on this rank's shard of the batch; returns metrics, reduced over all ranks."""
        shard = ray.get(data_ref[self._trainer.dp_rank].ref)
        return self._trainer.train(rollout_id, shard)

    def save(self, rollout_id: int, rollout_state: str) -> None:
        """Write a checkpoint set; the file at `rollout_state` becomes its rollout part."""
        self._trainer.save(rollout_id, rollout_state)

    def finish_saving(self) -> None:
        """Wait for the set that is still being written (--async-save)."""
        self._trainer.finish_saving()

    def export_hf(self, directory: str) -> None:
        self._trainer.export_hf(directory)

    def connect_engines(self, engine_urls: list[str]) -> None:
        self._trainer.connect_engines(engine_urls)

    def update_weights(self, again: bool = False) -> tuple[int, dict[str, float]]:
        """Send the weights to the engines as a new version, or `again` as the last one; returns version and metrics."""
        metrics = self._trainer.update_weights(again=again)
        return self._trainer.weight_version, metrics

    def weight_checksums(self) -> dict[str, str]:
        return self._trainer.weight_checksums()

    def ping(self) -> None:
        """Answers when the calls before it are done: its failure tells that the actor died."""

    def heart(self) -> Heart:
        """Begin to answer, beside whatever call there is, whether this process runs; returns where."""
        return start_heart()

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        trainer: Any = getattr(self, "_trainer", None)
        if trainer is not None:
            trainer.close()
