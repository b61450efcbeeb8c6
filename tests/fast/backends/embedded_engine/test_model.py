from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.backends.embedded_engine.kv_cache import KVCache
from miles.backends.embedded_engine.loading import check_attention
from miles.backends.embedded_engine.model import load_model
from miles.backends.embedded_engine.scheduler import Scheduler
from tests.fast.backends.embedded_engine.tiny import (
    CONTEXT_LENGTH,
    VOCAB_SIZE,
    char_ids,
    full_forward_logprobs,
    hugging_face,
    make_request,
    run_until_done,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def load(directory: Path, **options: Any) -> Any:
    return load_model(str(directory), **({"dtype": torch.float32, "device": CPU} | options))


def test_what_is_known_of_a_model(model_dir: Path) -> None:
    info = load(model_dir).info
    assert (info.model_type, info.architectures) == ("qwen3", ("Qwen3ForCausalLM",))
    assert (info.vocab_size, info.context_length) == (VOCAB_SIZE, CONTEXT_LENGTH)
    assert (info.kv_shape.layers, info.kv_shape.kv_heads, info.kv_shape.head_dim) == (2, 2, 16)
    assert info.kv_shape.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert load(model_dir, context_length=100).info.context_length == 100


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.bfloat16, 0.15)])
def test_other_types_use_the_fused_kernel_and_agree_too(
    model_dir: Path, reference: Any, dtype: torch.dtype, tolerance: float
) -> None:
    model = load(model_dir, dtype=dtype)
    scheduler = Scheduler(
        model,
        KVCache(model.info.kv_shape, context_length=CONTEXT_LENGTH, max_total_tokens=8192),
        max_running_requests=8,
        max_prefill_tokens=1024,
        version="default",
    )
    requests = [make_request(char_ids("5" * n), f"r{n}", seed=n, max_new_tokens=70) for n in (1, 5, 9, 60)]
    scheduler.add(requests)
    run_until_done(scheduler)
    for request in requests:
        expected = full_forward_logprobs(reference, request.prompt_ids, request.output_ids)
        assert request.output_logprobs == pytest.approx(expected, abs=tolerance)


def test_a_model_with_attention_of_its_own_is_refused(tmp_path: Path, model_dir: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not support BloomForCausalLM: 2 of its 2 layers"):
        check_attention(load(tmp_path))
    check_attention(load(model_dir))


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "dynamic position"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_model(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"does not support.*{message}.*--rollout-engine sglang"):
        load(tmp_path)


def test_unfit_directories_are_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no config\.json"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"--context-length must be at most the model's 512 positions, got 513"):
        load(model_dir, context_length=513)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="names no architecture"):
        load(tmp_path)
    write_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"the checkpoint lacks model\.norm\.weight"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="--model-path"):
        load(tmp_path)


def test_a_pickled_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    write_model(tmp_path)
    torch.save(hugging_face(tmp_path).state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="--model-path"):
        load(tmp_path)
