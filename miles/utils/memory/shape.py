"""Sizes of a model, from the fields of its config.json, and how many parameters each rank of a layout holds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen2", "llama")


@dataclass(frozen=True)
class Experts:
    """What takes the place of the MLP in every layer of a mixture-of-experts model."""

    number: int
    top_k: int
    ffn: int
    """Width of one expert."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder with RMSNorm, gated MLPs and grouped-query attention. It needs no more than sizes, so it also knows
    models that nothing here can build yet."""

    vocab: int
    hidden: int
    ffn: int
    """Width of a dense MLP."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    """Embedding and output layer are the same weights."""
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    experts: Experts | None = None

    @staticmethod
    def from_dir(directory: str) -> ModelShape:
        """Read `<directory>/config.json`; raises ValueError naming --hf-checkpoint where that is not possible."""
        path = Path(directory) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"--hf-checkpoint: {path} cannot be read: {error}") from error
        if not isinstance(raw, dict):
            raise ValueError(f"--hf-checkpoint: {path} holds no JSON object, but a {type(raw).__name__}")
        return ModelShape.from_config(raw, source=str(path))

    @staticmethod
    def from_config(raw: dict[str, Any], *, source: str = "config.json") -> ModelShape:
        """Raises ValueError naming the field."""
        kind = raw.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(f"{source}: model_type {kind!r} is not known; known: {', '.join(MODEL_TYPES)}")
        hidden, heads = _size(raw, "hidden_size", source), _size(raw, "num_attention_heads", source)
        return ModelShape(
            vocab=_size(raw, "vocab_size", source),
            hidden=hidden,
            ffn=_size(raw, "intermediate_size", source),
            layers=_size(raw, "num_hidden_layers", source),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            max_positions=int(raw.get("max_position_embeddings") or 32768),
            experts=Experts(
                # transformers 5 writes the second name.
                number=_size(raw, "num_experts" if "num_experts" in raw else "num_local_experts", source),
                top_k=_size(raw, "num_experts_per_tok", source),
                ffn=_size(raw, "moe_intermediate_size", source),
            )
            if kind == "qwen3_moe"
            else None,
        )


def _size(raw: dict[str, Any], key: str, source: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{source}: {key} must be a positive integer, got {value!r}")
    return value


@dataclass(frozen=True)
class Split:
    """How one pipeline stage's layers are cut over ranks."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1


@dataclass(frozen=True)
class ParameterCount:
    """Parameters, by what their copies are spread over: experts have data-parallel groups of their own."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(self.dense + other.dense, self.expert + other.expert)


def padded_vocab(vocab: int, tensor: int) -> int:
    """Rows of the embedding, so that every tensor-parallel rank holds as many."""
    return -(-vocab // tensor) * tensor


def count_parameters(
    shape: ModelShape, *, split: Split | None = None, layers: int | None = None, first: bool = True, last: bool = True
) -> ParameterCount:
    """Parameters of one rank that holds `layers` layers (None: all); `first`, `last`: of the first, last stage.

    Whole model, dense (h hidden, f ffn, a heads, k KV heads, d head size, V vocabulary, L layers):

        V h [twice if untied] + h + L (h (a + 2k) d + a d h + 3 h f + 2 h [+ 2 d with q, k norms] [+ (a + 2k) d bias])

    With E experts of width e, E h + 3 E h e replaces 3 h f. Tensor parallelism divides the projections and the rows of
    the embedding (as in Megatron-LM, arXiv:1909.08053, section 3); norms and the router are on every rank. With tied
    weights and several stages the last stage has a copy of the embedding.
    """
    split = split or Split()
    t, h = split.tensor, shape.hidden
    depth = shape.layers if layers is None else layers
    kv_heads = max(shape.kv_heads, t)  # fewer KV heads than ranks: some ranks hold copies
    qkv_rows = (shape.heads + 2 * kv_heads) * shape.head_dim // t
    layer = 2 * h + qkv_rows * h + shape.heads * shape.head_dim // t * h
    layer += 2 * shape.head_dim if shape.qk_norm else 0
    layer += qkv_rows if shape.qkv_bias else 0
    in_experts = 0
    if shape.experts is None:
        layer += 3 * h * shape.ffn // t
    else:
        layer += shape.experts.number * h
        in_experts = shape.experts.number // split.expert * 3 * h * shape.experts.ffn // split.expert_tensor
    embedding = padded_vocab(shape.vocab, t) // t * h
    dense = depth * layer
    dense += embedding if first else 0
    dense += h if last else 0
    dense += embedding if last and not (shape.tied and first) else 0
    return ParameterCount(dense, depth * in_experts)
