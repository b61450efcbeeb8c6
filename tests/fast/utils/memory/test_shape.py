"""Parameter counts: public figures, Hugging Face's own models, and that shards add up to the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from miles.utils.memory.layout import Layout
from miles.utils.memory.shape import ModelShape, ParameterCount, Split, count_parameters
from tests.fast.utils.memory.configs import LLAMA3_8B, QWEN2_7B, QWEN3_4B, QWEN3_30B_A3B


@pytest.mark.parametrize(
    ("config", "billions"),
    [(QWEN3_4B, 4.022), (QWEN3_30B_A3B, 30.532), (QWEN2_7B, 7.616), (LLAMA3_8B, 8.030)],
)
def test_public_figures(config: dict[str, Any], billions: float) -> None:
    assert count_parameters(ModelShape.from_config(config)).total / 1e9 == pytest.approx(billions, abs=0.0005)


@pytest.mark.parametrize("config", [QWEN3_4B, QWEN3_30B_A3B, QWEN2_7B, LLAMA3_8B])
def test_the_count_is_that_of_hugging_faces_model(config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {**config, "num_hidden_layers": 2, "vocab_size": 1000}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small))
    assert count_parameters(ModelShape.from_config(small)).total == sum(p.numel() for p in model.parameters())


def test_shards_of_experts_and_stages_add_up_to_the_whole() -> None:
    shape = ModelShape.from_config(QWEN3_30B_A3B)
    whole = count_parameters(shape)
    layout = Layout(world=12, pipeline=3, expert=4)
    stages = [
        count_parameters(shape, split=layout.split, layers=layers, first=i == 0, last=i == 2)
        for i, layers in enumerate(layout.stage_layers(shape))
    ]
    assert sum(stage.dense for stage in stages) == whole.dense
    assert sum(stage.expert for stage in stages) * 4 == whole.expert
    assert whole == ParameterCount(whole.total - whole.expert, whole.expert)


def test_tensor_parallelism_leaves_norms_and_routers_whole() -> None:
    shape = ModelShape.from_config(QWEN3_30B_A3B)
    half = count_parameters(shape, split=Split(tensor=2, expert_tensor=2))
    layer_whole = 2 * shape.hidden + 2 * shape.head_dim + 128 * shape.hidden
    assert 2 * half.total - count_parameters(shape).total == shape.layers * layer_whole + shape.hidden


def test_the_last_stage_of_a_tied_model_has_a_copy_of_the_embedding() -> None:
    shape = ModelShape.from_config(QWEN3_4B)
    last = count_parameters(shape, layers=1, first=False)
    untied = count_parameters(replace(shape, tied=False), layers=1, first=False)
    assert last == untied


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
    ],
)
def test_unknown_models_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelShape.from_config({**QWEN3_4B, **change})
