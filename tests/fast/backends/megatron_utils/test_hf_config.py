"""Reading `config.json`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from miles.backends.megatron_utils.hf_config import HFModelConfig, RopeScaling, parse_hf_config
from tests.fast.backends.megatron_utils.tiny_models import CONFIGS

if TYPE_CHECKING:
    from pathlib import Path


def parse(**overrides: Any) -> HFModelConfig:
    return parse_hf_config({**CONFIGS["qwen3-tied"], **overrides}, source="config.json")


def test_sizes_come_from_the_file() -> None:
    config = parse()
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (32, 2, 4, 2)
    assert config.head_dim == 16 and config.qk_norm and not config.qkv_bias and config.tie_word_embeddings


def test_head_dim_defaults_to_an_even_share_of_the_hidden_size() -> None:
    assert parse_hf_config(CONFIGS["qwen2-tied"], source="x").head_dim == 8


def test_rope_parameters_of_transformers_5_are_read() -> None:
    assert parse(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope_theta == 5e5


def test_llama3_scaling_keeps_its_factor() -> None:
    config = parse_hf_config(CONFIGS["llama3-rope"], source="x")
    assert config.rope_scaling == RopeScaling(factor=8.0) and config.rope_theta == 5e5


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"model_type": "gpt_neox"}, ["gpt_neox", "qwen3"]),
        ({"model_type": None}, ["model_type"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"num_hidden_layers": None}, ["num_hidden_layers"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "llama3"]),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        parse(**overrides)
    assert all(word in str(error.value) for word in words)


def test_missing_directory_and_missing_or_broken_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        HFModelConfig.from_dir(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no config\.json"):
        HFModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="not valid JSON"):
        HFModelConfig.from_dir(tmp_path)


def test_config_written_by_transformers_5_is_read(tmp_path: Path) -> None:
    raw = {**CONFIGS["qwen3-tied"], "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert HFModelConfig.from_dir(tmp_path) == parse()


def test_the_number_of_experts_may_have_the_name_that_transformers_5_writes() -> None:
    raw = {**CONFIGS["qwen3-moe"]}
    raw["num_local_experts"] = raw.pop("num_experts")
    assert parse_hf_config(raw, source="config.json") == parse_hf_config(CONFIGS["qwen3-moe"], source="config.json")
