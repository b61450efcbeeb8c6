"""An exported checkpoint is one that transformers loads, with equal logits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from miles.backends.megatron_utils.hf_export import publish
from tests.fast.backends.megatron_utils.test_model import hugging_face_log_probs
from tests.fast.backends.megatron_utils.tiny_models import make_args, make_shard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-untied", "llama-untied"])
def test_export_after_training_loads_in_transformers(
    name: str, checkpoints: dict[str, Path], trainer_of: Callable[..., Any], tmp_path: Path
) -> None:
    from miles.backends.megatron_utils.train_data import batch_from_shard

    trainer = trainer_of(make_args(checkpoints[name]))
    trainer.train(0, make_shard(seed=0))
    trainer.export_hf(str(tmp_path / "out"))
    shard = make_shard(seed=1)
    theirs = hugging_face_log_probs(tmp_path / "out", shard, temperature=1.0)
    ours = trainer._log_probs(trainer._stages, batch_from_shard(shard, torch.device("cpu")))
    assert max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) < 1e-4
    before = hugging_face_log_probs(checkpoints[name], shard, temperature=1.0)
    assert max((a - b).abs().max().item() for a, b in zip(before, theirs, strict=True)) > 1e-3
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["dtype"] == "float32"


def test_a_failed_export_leaves_the_former_one(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with publish(target) as part:
        (part / "a").write_text("old", encoding="utf-8")
    with pytest.raises(RuntimeError, match="stop"), publish(target) as part:
        (part / "a").write_text("new", encoding="utf-8")
        raise RuntimeError("stop")
    assert (target / "a").read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with publish(target) as part:
        (part / "a").write_text("new", encoding="utf-8")
    assert (target / "a").read_text(encoding="utf-8") == "new"
