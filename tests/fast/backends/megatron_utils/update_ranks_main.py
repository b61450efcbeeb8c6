"""One of two trainer ranks that update an engine: `python -m ... RANK PORT CHECKPOINT ENGINE_URL OUT LAYOUT`.

The engine gets a version, then refuses one in its second bucket, then gets it after all. OUT is what this rank met.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from miles.backends.megatron_utils.engine_client import WeightUpdateError
from miles.backends.megatron_utils.trainer import MegatronTrainer
from tests.fast.backends.megatron_utils.parallel_main import share
from tests.fast.backends.megatron_utils.tiny_models import make_args, make_shard

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


def refuse_the_second_bucket(trainer: MegatronTrainer) -> Any:
    """Returns what undoes it."""
    updater: Any = trainer._updater
    send, sent = updater._send, []

    def refuse(bucket: Any, version: int) -> None:
        sent.append(bucket)
        if len(sent) == 2:
            raise WeightUpdateError("http://culprit", "/update_weights_from_distributed", 400, "no")
        send(bucket, version)

    updater._send = refuse
    return lambda: setattr(updater, "_send", send)


def main(rank: int, port: int, checkpoint: str, url: str, layout: str) -> dict[str, Any]:
    args = make_args(
        Path(checkpoint),
        check_weight_update_equal=True,
        rollout_engine="embedded",
        update_weight_buffer_size=8192,
        micro_batch_size=2,
        **LAYOUTS[layout],
    )
    trainer = MegatronTrainer(args, rank=rank, world_size=2, master_addr="127.0.0.1", master_port=port)
    try:
        trainer.connect_engines([url])
        trainer.train(0, share(make_shard(seed=0), trainer.dp_rank, trainer.dp_size))
        found: dict[str, Any] = {"bytes": trainer.update_weights().get("perf/update_weights_bytes")}
        undo = refuse_the_second_bucket(trainer) if rank == 0 else lambda: None
        trainer.train(1, share(make_shard(seed=1), trainer.dp_rank, trainer.dp_size))
        try:
            trainer.update_weights()
        except WeightUpdateError as error:
            found |= {"culprit": error.engine_url, "version then": trainer.weight_version}
        undo()
        trainer.connect_engines([url])
        trainer.update_weights()
        found["version"] = trainer.weight_version
    finally:
        trainer.close()
    return found


if __name__ == "__main__":
    rank, port, checkpoint, url, out, layout = sys.argv[1:]
    Path(out).write_text(json.dumps(main(int(rank), int(port), checkpoint, url, layout)), encoding="utf-8")
