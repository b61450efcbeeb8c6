"""A set saved by one layout of ranks is continued by any other as if nothing had happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from miles.backends.megatron_utils.checkpoint import verify
from tests.fast.backends.megatron_utils.parallel_main import Job, assert_equal, run, run_world

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"), pytest.mark.timeout(300)]

SPLIT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, **DISTRIBUTED}
EXPERTS = {"expert_model_parallel_size": 2, **DISTRIBUTED}
BOTH_SPLIT = {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
BF16 = {"bf16": True, **SPLIT, **DISTRIBUTED}


def first(name: str, checkpoint: str, save: Path, flags: dict[str, Any]) -> Job:
    return Job(name, checkpoint, {**flags, "save": str(save)}, save=True)


def second(name: str, checkpoint: str, load: Path, flags: dict[str, Any]) -> Job:
    return Job(name, checkpoint, {**flags, "load": str(load)}, rollouts=(2, 3), resume=True)


def test_every_layout_continues_every_other(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    dense, experts = str(checkpoints["qwen3-deep-tied"]), str(checkpoints["qwen3-moe"])
    whole, split, moe, bf16 = (tmp_path / name for name in ("whole", "split", "moe", "bf16"))
    run(first("whole", dense, whole, {}))
    jobs = [
        first("split", dense, split, {**SPLIT, **DISTRIBUTED, "async_save": True}),
        second("split", dense, split, {**SPLIT, **DISTRIBUTED}),
        second("split to interleaved", dense, split, INTERLEAVED),
        second("whole to split", dense, whole, SPLIT),
        first("experts", experts, moe, EXPERTS),
        second("experts to both split", experts, moe, BOTH_SPLIT),
        first("bf16", dense, bf16, BF16),
        second("bf16", dense, bf16, BF16),
        Job("bf16 uninterrupted", dense, BF16, rollouts=(0, 1, 2, 3)),
    ]
    jobs = [Job(**{**vars(job), "name": f"{i} {job.name}"}) for i, job in enumerate(jobs)]
    ranks = run_world(jobs, 4, tmp_path)

    files = sorted(path.name for path in (split / "iter_0000001").iterdir())
    assert [name for name in files if name.endswith(".safetensors")] == [
        *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)),
        *(f"optimizer-0000{i}-of-00002.safetensors" for i in (1, 2)),
        "rng.safetensors",
    ]
    assert all(verify(path / "iter_0000001") is None for path in (whole, split, moe, bf16))

    found = [run(second("split to whole", dense, split, {})), run(second("experts to whole", experts, moe, {}))]
    everything = {
        "dense": run(Job("uninterrupted", dense, rollouts=(0, 1, 2, 3))),
        "experts": run(Job("uninterrupted", experts, rollouts=(0, 1, 2, 3))),
        "bf16": ranks[0][jobs[-1].name],
    }
    expected = {name: {**result, "metrics": result["metrics"][2:]} for name, result in everything.items()}
    assert_equal(found[0], expected["dense"], "split to whole")
    assert_equal(found[1], expected["experts"], "experts to whole")
    for rank, results in enumerate(ranks):
        for job in jobs:
            if job.resume:
                kind = "bf16" if "bf16" in job.name else "experts" if "experts" in job.name else "dense"
                assert_equal(results[job.name], expected[kind], (job.name, rank))
