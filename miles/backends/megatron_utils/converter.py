"""Weights between Hugging Face's naming and megatron-core's, both ways, bit for bit, whole or split over ranks.

One `ParamSpec` per megatron-core parameter says which Hugging Face tensors it is made of, how, and how its rows or
columns are split over tensor-parallel ranks:

    megatron-core                              Hugging Face (Qwen3, Qwen2, Llama)          merge, split
    embedding.word_embeddings.weight           model.embed_tokens.weight                   copy, vocabulary rows
    output_layer.weight                        lm_head.weight (tied: embed_tokens)         copy, vocabulary rows
    decoder.final_layernorm.weight             model.norm.weight                           copy
    decoder.layers.N.
      input_layernorm.weight                   ...input_layernorm.weight                   copy
      self_attention.linear_qkv.{weight,bias}  ...self_attn.{q,k,v}_proj.{weight,bias}     interleaved by KV group, rows
      self_attention.{q,k}_layernorm.weight    ...self_attn.{q,k}_norm.weight              copy
      self_attention.linear_proj.weight        ...self_attn.o_proj.weight                  copy, columns
      pre_mlp_layernorm.weight                 ...post_attention_layernorm.weight          copy
      mlp.linear_fc1.weight                    ...mlp.{gate,up}_proj.weight                stacked, rows of each
      mlp.linear_fc2.weight                    ...mlp.down_proj.weight                     copy, columns
      mlp.router.weight                        ...mlp.gate.weight                          copy
      mlp.experts.local_experts.E.linear_fc1.weight   ...mlp.experts.E.{gate,up}_proj.weight   as linear_fc1 above
      mlp.experts.local_experts.E.linear_fc2.weight   ...mlp.experts.E.down_proj.weight        as linear_fc2 above

Transformer Engine fuses the two layer norms into the linears that follow them, so there they are called
`self_attention.linear_qkv.layer_norm_weight` and `mlp.linear_fc1.layer_norm_weight`, and it groups the experts:
`mlp.experts.linear_fc1.weightE`; both namings are known. Layers count from the first of their pipeline stage, experts
from the first of their expert-parallel rank; the offsets make the numbers those of the whole model.
Merging and splitting only move values, so the same functions also convert optimizer moments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miles.backends.megatron_utils.hf_config import HFModelConfig


class Merge(Enum):
    COPY = "copy"
    QKV = "qkv"
    STACK = "stack"


class Split(Enum):
    """What tensor-parallel ranks have of a parameter."""

    NONE = "every rank has all of it"
    VOCABULARY = "rows, padded behind the vocabulary so that every rank has as many"
    ROWS = "rows"
    COLUMNS = "columns"

    @property
    def is_whole(self) -> bool:
        return self is Split.NONE


@dataclass(frozen=True)
class ParamSpec:
    """How one megatron-core parameter is made of Hugging Face tensors."""

    hf_names: tuple[str, ...]
    merge: Merge
    split: Split = Split.NONE
    is_expert: bool = False
    """Split over the expert-tensor-parallel ranks, and held by one expert-parallel rank."""


_GLOBAL = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", Split.VOCABULARY),
    "decoder.final_layernorm.weight": ("model.norm.weight", Split.NONE),
    "output_layer.weight": ("lm_head.weight", Split.VOCABULARY),
}
_INPUT_NORM = ParamSpec(("input_layernorm.weight",), Merge.COPY)
_MLP_NORM = ParamSpec(("post_attention_layernorm.weight",), Merge.COPY)
_LAYER = {
    "input_layernorm.weight": _INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": _INPUT_NORM,
    "self_attention.linear_qkv.weight": ParamSpec(
        tuple(f"self_attn.{p}_proj.weight" for p in "qkv"), Merge.QKV, Split.ROWS
    ),
    "self_attention.linear_qkv.bias": ParamSpec(
        tuple(f"self_attn.{p}_proj.bias" for p in "qkv"), Merge.QKV, Split.ROWS
    ),
    "self_attention.q_layernorm.weight": ParamSpec(("self_attn.q_norm.weight",), Merge.COPY),
    "self_attention.k_layernorm.weight": ParamSpec(("self_attn.k_norm.weight",), Merge.COPY),
    "self_attention.linear_proj.weight": ParamSpec(("self_attn.o_proj.weight",), Merge.COPY, Split.COLUMNS),
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,
    "mlp.linear_fc1.weight": ParamSpec(("mlp.gate_proj.weight", "mlp.up_proj.weight"), Merge.STACK, Split.ROWS),
    "mlp.linear_fc2.weight": ParamSpec(("mlp.down_proj.weight",), Merge.COPY, Split.COLUMNS),
    "mlp.router.weight": ParamSpec(("mlp.gate.weight",), Merge.COPY),
}
_EXPERT = {
    "linear_fc1": (("gate_proj.weight", "up_proj.weight"), Merge.STACK, Split.ROWS),
    "linear_fc2": (("down_proj.weight",), Merge.COPY, Split.COLUMNS),
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_NAMES = (
    re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<linear>linear_fc[12])\.weight"),
    re.compile(r"mlp\.experts\.(?P<linear>linear_fc[12])\.weight(?P<expert>\d+)"),
)


def param_spec(mcore_name: str, *, layer_offset: int = 0, expert_offset: int = 0, tied: bool = False) -> ParamSpec:
    """The spec of a parameter by its megatron-core name on one rank; `layer_offset` is the first layer of its pipeline
    stage, `expert_offset` the first expert of its expert-parallel rank, `tied` whether the output layer is the
    embedding (of which the last pipeline stage has a copy).

    Raises:
        ValueError: a parameter that no supported model has.
    """
    if mcore_name in _GLOBAL:
        hf_name, split = _GLOBAL["embedding.word_embeddings.weight" if _is_copy(mcore_name, tied) else mcore_name]
        return ParamSpec((hf_name,), Merge.COPY, split)
    match = _LAYER_NAME.fullmatch(mcore_name)
    spec = _in_layer(match[2], expert_offset) if match else None
    if match is None or spec is None:
        raise ValueError(f"no Hugging Face counterpart is known for the megatron-core parameter {mcore_name!r}")
    prefix = f"model.layers.{int(match[1]) + layer_offset}."
    return ParamSpec(tuple(prefix + name for name in spec.hf_names), spec.merge, spec.split, spec.is_expert)


def _is_copy(mcore_name: str, tied: bool) -> bool:
    return tied and mcore_name == "output_layer.weight"


def _in_layer(name: str, expert_offset: int) -> ParamSpec | None:
    if name in _LAYER:
        return _LAYER[name]
    match = next((found for pattern in _EXPERT_NAMES if (found := pattern.fullmatch(name))), None)
    if match is None:
        return None
    names, merge, split = _EXPERT[match["linear"]]
    prefix = f"mlp.experts.{int(match['expert']) + expert_offset}."
    return ParamSpec(tuple(prefix + hf_name for hf_name in names), merge, split, is_expert=True)


def mcore_names(hf: HFModelConfig) -> Iterator[str]:
    """The parameters of the whole model in megatron-core's (local) naming, in its order."""
    yield "embedding.word_embeddings.weight"
    layer = ["input_layernorm.weight", "self_attention.linear_proj.weight", "self_attention.linear_qkv.weight"]
    layer += ["self_attention.linear_qkv.bias"] * hf.qkv_bias
    layer += [f"self_attention.{p}_layernorm.weight" for p in "qk"] * hf.qk_norm
    layer += ["pre_mlp_layernorm.weight"]
    if hf.moe is None:
        layer += [f"mlp.{linear}.weight" for linear in _EXPERT]
    else:
        experts = range(hf.moe.num_experts)
        layer += ["mlp.router.weight"]
        layer += [f"mlp.experts.local_experts.{expert}.{linear}.weight" for expert in experts for linear in _EXPERT]
    for number in range(hf.num_layers):
        yield from (f"decoder.layers.{number}.{name}" for name in layer)
    yield "decoder.final_layernorm.weight"
    if not hf.tie_word_embeddings:
        yield "output_layer.weight"


def hf_names(hf: HFModelConfig) -> list[str]:
    """The Hugging Face tensors of the whole model."""
    return [name for mcore_name in mcore_names(hf) for name in param_spec(mcore_name).hf_names]


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
    rows = [hf.num_heads // hf.num_kv_heads * hf.head_dim, hf.head_dim, hf.head_dim]
    groups = tensor.shape[0] // sum(rows)
    parts = tensor.reshape(groups, sum(rows), *tensor.shape[1:]).split(rows, dim=1)
    return [part.flatten(0, 1) for part in parts]


def shard(spec: ParamSpec, tensors: Sequence[torch.Tensor], hf: HFModelConfig, *, rank: int, size: int) -> torch.Tensor:
    """The part of the megatron-core tensor that tensor-parallel rank `rank` of `size` holds."""
    if size == 1 or spec.split is Split.NONE:
        return to_mcore(spec, tensors, hf)
    if spec.split is Split.VOCABULARY:
        return _vocabulary_rows(tensors[0], rank, size)
    if spec.merge is Merge.QKV:
        return _part(to_mcore(spec, tensors, hf), 0, rank, size)
    dim = 1 if spec.split is Split.COLUMNS else 0
    return to_mcore(spec, [_part(tensor, dim, rank, size) for tensor in tensors], hf)


def unshard(spec: ParamSpec, shards: Sequence[torch.Tensor], hf: HFModelConfig) -> list[torch.Tensor]:
    """The Hugging Face tensors of `spec.hf_names`, from the shards of all tensor-parallel ranks: inverse of `shard`."""
    if len(shards) == 1 or spec.split is Split.NONE:
        return to_hf(spec, shards[0], hf)
    if spec.split is Split.VOCABULARY:
        return [torch.cat(list(shards))[: hf.vocab_size]]
    dim = 1 if spec.split is Split.COLUMNS else 0
    parts = zip(*(to_hf(spec, part, hf) for part in shards), strict=True)
    return [torch.cat(part, dim=dim) for part in parts]


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding: the vocabulary, rounded up so that every tensor-parallel rank holds as many."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def _vocabulary_rows(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Rows of `rank`; those behind the vocabulary are zero."""
    rows = padded_vocab_size(tensor.shape[0], size) // size
    own = tensor[rank * rows : (rank + 1) * rows]
    return torch.cat([own, own.new_zeros(rows - own.shape[0], *own.shape[1:])]) if own.shape[0] < rows else own


def _part(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    length, rest = divmod(tensor.shape[dim], size)
    if rest:
        raise ValueError(f"a dimension of {tensor.shape[dim]} does not divide among {size} tensor-parallel ranks")
    return tensor.narrow(dim, rank * length, length)
