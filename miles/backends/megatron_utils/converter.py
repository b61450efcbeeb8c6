"""Weights between Hugging Face's naming and megatron-core's, both ways, bit for bit.

One `ParamSpec` per megatron-core parameter says which Hugging Face tensors it is made of and how:

    megatron-core                              Hugging Face (Qwen3, Qwen2, Llama)          merge
    embedding.word_embeddings.weight           model.embed_tokens.weight                   copy
    output_layer.weight                        lm_head.weight (untied models only)         copy
    decoder.final_layernorm.weight             model.norm.weight                           copy
    decoder.layers.N.
      input_layernorm.weight                   ...input_layernorm.weight                   copy
      self_attention.linear_qkv.{weight,bias}  ...self_attn.{q,k,v}_proj.{weight,bias}     interleaved by KV group
      self_attention.{q,k}_layernorm.weight    ...self_attn.{q,k}_norm.weight              copy
      self_attention.linear_proj.weight        ...self_attn.o_proj.weight                  copy
      pre_mlp_layernorm.weight                 ...post_attention_layernorm.weight          copy
      mlp.linear_fc1.weight                    ...mlp.{gate,up}_proj.weight                stacked
      mlp.linear_fc2.weight                    ...mlp.down_proj.weight                     copy

Transformer Engine fuses the two layer norms into the linears that follow them, so there they are called
`self_attention.linear_qkv.layer_norm_weight` and `mlp.linear_fc1.layer_norm_weight`; both namings are known.
Merging and splitting only move values, so the same functions also convert optimizer moments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miles.backends.megatron_utils.hf_config import HFModelConfig


class Merge(Enum):
    COPY = "copy"
    QKV = "qkv"
    STACK = "stack"


@dataclass(frozen=True)
class ParamSpec:
    """How one megatron-core parameter is made of Hugging Face tensors."""

    hf_names: tuple[str, ...]
    merge: Merge


_GLOBAL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": (("input_layernorm.weight",), Merge.COPY),
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",), Merge.COPY),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), Merge.COPY),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), Merge.COPY),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), Merge.COPY),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), Merge.COPY),
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight",), Merge.COPY),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), Merge.STACK),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), Merge.COPY),
    "self_attention.linear_qkv.weight": (tuple(f"self_attn.{p}_proj.weight" for p in "qkv"), Merge.QKV),
    "self_attention.linear_qkv.bias": (tuple(f"self_attn.{p}_proj.bias" for p in "qkv"), Merge.QKV),
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def param_spec(mcore_name: str, *, layer_offset: int = 0) -> ParamSpec:
    """The spec of a parameter by its megatron-core name; `layer_offset` is the first layer of this pipeline stage.

    Raises:
        ValueError: a parameter that no supported model has.
    """
    if mcore_name in _GLOBAL:
        return ParamSpec((_GLOBAL[mcore_name],), Merge.COPY)
    match = _LAYER_NAME.fullmatch(mcore_name)
    if match is None or match[2] not in _LAYER:
        raise ValueError(f"no Hugging Face counterpart is known for the megatron-core parameter {mcore_name!r}")
    names, merge = _LAYER[match[2]]
    prefix = f"model.layers.{int(match[1]) + layer_offset}."
    return ParamSpec(tuple(prefix + name for name in names), merge)


def to_mcore(spec: ParamSpec, tensors: Sequence[torch.Tensor], hf: HFModelConfig) -> torch.Tensor:
    """Merge the Hugging Face tensors of `spec.hf_names` into one megatron-core tensor."""
    if spec.merge is Merge.COPY:
        return tensors[0]
    if spec.merge is Merge.STACK:
        return torch.cat(list(tensors))
    groups = hf.num_kv_heads
    return torch.cat([t.reshape(groups, -1, *t.shape[1:]) for t in tensors], dim=1).flatten(0, 1)


def to_hf(spec: ParamSpec, tensor: torch.Tensor, hf: HFModelConfig) -> list[torch.Tensor]:
    """Split one megatron-core tensor into the Hugging Face tensors of `spec.hf_names`: the inverse of `to_mcore`."""
    if spec.merge is Merge.COPY:
        return [tensor]
    if spec.merge is Merge.STACK:
        return list(tensor.chunk(2))
    groups = hf.num_kv_heads
    rows = [hf.num_heads // groups * hf.head_dim, hf.head_dim, hf.head_dim]
    parts = tensor.reshape(groups, sum(rows), *tensor.shape[1:]).split(rows, dim=1)
    return [part.flatten(0, 1) for part in parts]
