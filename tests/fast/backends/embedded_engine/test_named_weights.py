"""Experts that transformers fuses have the names of the checkpoint, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from miles.backends.embedded_engine.model import load_model
from miles.backends.embedded_engine.named_weights import named_weights, swap_weights
from miles.backends.embedded_engine.weights import WeightReceiver
from tests.fast.backends.embedded_engine.tiny import write_model

if TYPE_CHECKING:
    from pathlib import Path

EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "hidden_size": 32}


def load(directory: Path) -> Any:
    return load_model(str(directory), dtype=torch.float32, device=torch.device("cpu")).module


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path, architecture="Qwen3MoeForCausalLM", tie_word_embeddings=False, **EXPERTS)


def test_names_and_values_are_the_checkpoints(directory: Path) -> None:
    weights, stored = named_weights(load(directory)), load_file(directory / "model.safetensors")
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)


def test_a_swap_brings_the_new_weights_in_and_leaves_who_reads_the_old_ones_alone(
    directory: Path, tmp_path: Path
) -> None:
    module = load(directory)
    before = {name: weight.data for name, weight in named_weights(module).items()}
    stored = {name: tensor.clone() for name, tensor in before.items()}
    other = write_model(
        tmp_path / "other", seed=1, architecture="Qwen3MoeForCausalLM", tie_word_embeddings=False, **EXPERTS
    )
    new = load_file(other / "model.safetensors")
    swap_weights(module, new)
    assert all(torch.equal(weight, new[name]) for name, weight in named_weights(module).items())
    assert all(torch.equal(before[name], stored[name]) for name in stored)


def test_a_part_of_the_experts_may_come_alone(directory: Path) -> None:
    module = load(directory)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    old = {key: weight.clone() for key, weight in named_weights(module).items()}
    swap_weights(module, {name: torch.zeros_like(old[name])})
    now = named_weights(module)
    assert [key for key in now if not torch.equal(now[key], old[key])] == [name]


def test_the_receiver_takes_a_whole_checkpoint(directory: Path) -> None:
    receiver = WeightReceiver(named_weights(load(directory), remove_duplicate=False), timeout=5)
    assert receiver.read_directory(str(directory)).tensors.keys() == load_file(directory / "model.safetensors").keys()


def test_tied_weights_are_one_object_under_both_names(tmp_path: Path) -> None:
    weights = named_weights(load(write_model(tmp_path)), remove_duplicate=False)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    assert "lm_head.weight" not in named_weights(load(tmp_path))


def test_an_unknown_name_is_our_own_mistake(directory: Path) -> None:
    with pytest.raises(KeyError, match=r"no\.such\.weight"):
        swap_weights(load(directory), {"no.such.weight": torch.zeros(1)})
