"""The model agrees with Hugging Face's, packed or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from miles.backends.megatron_utils.attention import plan_layout
from miles.backends.megatron_utils.train_data import batch_from_shard
from tests.fast.backends.megatron_utils.tiny_models import CONFIGS, VOCAB, make_args, make_shard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")


def hugging_face_log_probs(directory: Path, shard: dict[str, Any], temperature: float) -> list[torch.Tensor]:
    """Log-probabilities of the response tokens by a full, unpacked forward pass of each sample."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    result = []
    for tokens, response in zip(shard["tokens"], shard["response_lengths"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].float() / temperature
        chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:]).view(-1, 1)).flatten()
        result.append(chosen[len(chosen) - response :])
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_equal_hugging_face(name: str, checkpoints: dict[str, Path], trainer_of: Callable[..., Any]) -> None:
    shard = make_shard(seed=1)
    trainer = trainer_of(make_args(checkpoints[name], rollout_temperature=0.7, micro_batch_size=3))
    batch = batch_from_shard(shard, torch.device("cpu"))
    ours = trainer._log_probs(trainer._stages, batch)
    theirs = hugging_face_log_probs(checkpoints[name], shard, temperature=0.7)
    difference = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    assert difference < 1e-4, difference
    spread = torch.cat(theirs).std().item()
    assert spread > 0.5, "the reference is too flat for the comparison to mean anything"


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-untied"])
def test_weights_come_back_out_bit_for_bit(
    name: str, checkpoints: dict[str, Path], trainer_of: Callable[..., Any]
) -> None:
    from safetensors.torch import load_file

    trainer = trainer_of(make_args(checkpoints[name]))
    exported = dict(trainer.hf_named_tensors())
    original = load_file(checkpoints[name] / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in original.items())


def test_a_checkpoint_that_disagrees_with_its_config_is_refused(
    checkpoints: dict[str, Path], trainer_of: Callable[..., Any], tmp_path: Path
) -> None:
    import json
    import shutil

    for key, value, words in [
        ("vocab_size", VOCAB * 2, r"embed_tokens.*has shape"),
        ("num_hidden_layers", 1, "no place for"),
        ("num_hidden_layers", 3, r"no tensor 'model\.layers\.2"),
    ]:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(checkpoints["qwen3-tied"], tmp_path / "bad")
        config = {**CONFIGS["qwen3-tied"], key: value}
        (tmp_path / "bad" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            trainer_of(make_args(tmp_path / "bad"))


def test_sequences_of_similar_length_share_a_group() -> None:
    device = torch.device("cpu")
    assert len(plan_layout([18, 12, 15], device=device).groups) == 1
    lengths = [6000, 10, 12, 9000, 11]
    layout = plan_layout(lengths, device=device)
    padded = sum(group.num_sequences * group.longest for group in layout.groups)
    assert len(layout.groups) > 1 and padded < 1.6 * sum(lengths)
    assert sorted(layout.scatter.tolist()) == sorted(set(layout.scatter.tolist()))
    # every packed position is gathered into the slot that it is scattered from
    gathered = torch.cat([group.gather for group in layout.groups])
    assert torch.equal(gathered[layout.scatter], torch.arange(sum(lengths)))


def test_sequences_of_very_different_lengths_do_not_see_each_other() -> None:
    """Grouped and padded attention equals attention of each sequence alone."""
    from types import SimpleNamespace

    from miles.backends.megatron_utils.attention import PackedAttention, packed_params

    torch.manual_seed(0)
    lengths = [3, 5000, 7, 4500, 1]
    total = sum(lengths)
    query, key, value = (torch.randn(total, heads, 4, requires_grad=True) for heads in (2, 1, 1))
    attention = PackedAttention(SimpleNamespace(softmax_scale=None, attention_dropout=0.0), 1, None, "self")
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    out = attention(query, key, value, packed_seq_params=packed_params(starts, lengths, with_layout=True))
    first = out[:3].sum()
    grad = torch.autograd.grad(first, [query, key, value])
    assert all(torch.all(g[3:] == 0) for g in grad)
    for i, length in enumerate(lengths):
        part = slice(int(starts[i]), int(starts[i]) + length)
        alone = attention(*(t[part].unsqueeze(1) for t in (query, key, value)))
        torch.testing.assert_close(out[part], alone.squeeze(1), atol=1e-5, rtol=1e-5)
