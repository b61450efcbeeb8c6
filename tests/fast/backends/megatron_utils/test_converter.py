"""Hugging Face <-> megatron-core, bit for bit, for every parameter of every family."""

from __future__ import annotations

import pytest
import torch

from miles.backends.megatron_utils.converter import hf_names, param_spec, shard, to_hf, to_mcore, unshard
from miles.backends.megatron_utils.hf_config import HFModelConfig, parse_hf_config
from tests.fast.backends.megatron_utils.tiny_models import CONFIGS, hf_shapes

FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def mcore_names(hf: HFModelConfig, *, fused: bool) -> list[str]:
    """The parameters of megatron-core's model, with the local or the Transformer Engine naming of the norms."""
    layer = ["self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"]
    if hf.moe:  # Transformer Engine's experts do not take the norm in front of them into their linears
        layer += ["input_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.router.weight"]
        names = "mlp.experts.linear_fc{n}.weight{e}" if fused else "mlp.experts.local_experts.{e}.linear_fc{n}.weight"
        layer += [names.format(n=n, e=e) for n in (1, 2) for e in range(hf.moe.num_experts)]
    else:
        layer += ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
        layer += [FUSED_NORMS[n] if fused else n for n in FUSED_NORMS]
    layer += ["self_attention.linear_qkv.bias"] * hf.qkv_bias
    layer += [f"self_attention.{p}_layernorm.weight" for p in "qk"] * hf.qk_norm
    names = [f"decoder.layers.{i}.{name}" for i in range(hf.num_layers) for name in layer]
    names += ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    return names + ([] if hf.tie_word_embeddings else ["output_layer.weight"])


@pytest.mark.parametrize("fused", [False, True], ids=["local", "transformer-engine"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_survives_both_ways(name: str, fused: bool) -> None:
    hf = parse_hf_config(CONFIGS[name], source=name)
    expected = {key: torch.randn(shape) for key, shape in hf_shapes(CONFIGS[name]).items()}
    seen: set[str] = set()
    for mcore_name in mcore_names(hf, fused=fused):
        spec = param_spec(mcore_name)
        merged = to_mcore(spec, [expected[n] for n in spec.hf_names], hf)
        back = to_hf(spec, merged, hf)
        for hf_name, tensor in zip(spec.hf_names, back, strict=True):
            assert torch.equal(tensor, expected[hf_name]), hf_name
        assert torch.equal(to_mcore(spec, back, hf), merged), mcore_name
        seen.update(spec.hf_names)
    assert seen == set(expected) == set(hf_names(hf))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_survives_being_split_over_ranks(name: str) -> None:
    hf = parse_hf_config(CONFIGS[name], source=name)
    tensors = {key: torch.randn(shape) for key, shape in hf_shapes(CONFIGS[name]).items()}
    for mcore_name in mcore_names(hf, fused=False):
        spec = param_spec(mcore_name)
        whole = [tensors[n] for n in spec.hf_names]
        shards = [shard(spec, whole, hf, rank=rank, size=2) for rank in range(2)]
        assert shards[0].shape == shards[1].shape, mcore_name
        if not spec.split.is_whole:
            assert sum(part.numel() for part in shards) in (sum(t.numel() for t in whole), 66 * 32), mcore_name
        for back, tensor in zip(unshard(spec, shards, hf), whole, strict=True):
            assert torch.equal(back, tensor), mcore_name


def test_a_rank_has_the_gate_and_the_up_rows_of_the_same_neurons() -> None:
    hf = parse_hf_config(CONFIGS["qwen3-tied"], source="x")
    spec = param_spec("decoder.layers.0.mlp.linear_fc1.weight")
    gate, up = torch.arange(4).view(4, 1), torch.arange(10, 14).view(4, 1)
    assert shard(spec, [gate, up], hf, rank=1, size=2).flatten().tolist() == [2, 3, 12, 13]


def test_experts_are_counted_on_from_the_first_of_their_rank() -> None:
    names = ("model.layers.3.mlp.experts.6.down_proj.weight",)
    for mcore_name in ("mlp.experts.local_experts.2.linear_fc2.weight", "mlp.experts.linear_fc2.weight2"):
        spec = param_spec(f"decoder.layers.1.{mcore_name}", layer_offset=2, expert_offset=4)
        assert spec.hf_names == names and spec.is_expert


def test_the_output_layer_of_a_tied_model_is_a_copy_of_the_embedding() -> None:
    assert param_spec("output_layer.weight", tied=True).hf_names == ("model.embed_tokens.weight",)


def test_queries_are_interleaved_with_the_keys_and_values_of_their_group() -> None:
    hf = parse_hf_config({**CONFIGS["qwen3-tied"], "head_dim": 1}, source="x")
    spec = param_spec("decoder.layers.0.self_attention.linear_qkv.weight")
    q, k, v = (torch.tensor(rows).view(-1, 1) for rows in ([0, 1, 2, 3], [10, 11], [20, 21]))
    assert to_mcore(spec, [q, k, v], hf).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_layer_numbers_are_shifted_on_later_pipeline_stages() -> None:
    spec = param_spec("decoder.layers.1.mlp.linear_fc2.weight", layer_offset=4)
    assert spec.hf_names == ("model.layers.5.mlp.down_proj.weight",)


def test_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"mlp\.gate\.weight"):
        param_spec("decoder.layers.0.mlp.gate.weight")
