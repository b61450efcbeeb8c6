"""One of two trainer ranks, started by test_data_parallel.py: `python -m ... RANK PORTS CHECKPOINT OUT SAVE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from miles.backends.megatron_utils.trainer import MegatronTrainer
from tests.fast.backends.megatron_utils.tiny_models import make_args, make_shard

FLAGS: dict[str, dict[str, Any]] = {
    "samples": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "use_tis": True, "tis_clip": 2.0},
    "tokens": {"calculate_per_token_loss": True, "normalize_advantages": True, "micro_batch_size": 3},
}


def half(shard: dict[str, Any], rank: int) -> dict[str, Any]:
    """Every second sample; the batch-wide number stays."""
    return {key: value[rank::2] if isinstance(value, list) else value for key, value in shard.items()}


def run(checkpoint: str, *, rank: int, world_size: int, ports: list[int], save: str) -> dict[str, Any]:
    """Two rollouts with each set of flags; the numbers to compare."""
    results: dict[str, Any] = {}
    for i, (name, flags) in enumerate(FLAGS.items()):
        args = make_args(Path(checkpoint), lr=1e-3, adam_eps=1e-5, tis_clip_low=0.0, save=save, **flags)
        trainer = MegatronTrainer(args, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=ports[i])
        metrics = []
        for step in range(2):
            shard = make_shard(seed=step)
            metrics.append(trainer.train(step, shard if world_size == 1 else half(shard, rank)))
        if save:
            trainer.save(1)
        results[name] = {
            "metrics": metrics,
            "weights": {n: t.flatten().tolist() for n, t in trainer.hf_named_tensors()},
        }
        trainer.close()
    return results


if __name__ == "__main__":
    rank, ports, checkpoint, out, save = sys.argv[1:]
    found = run(checkpoint, rank=int(rank), world_size=2, ports=[int(port) for port in ports.split(",")], save=save)
    Path(out).write_text(json.dumps(found), encoding="utf-8")
