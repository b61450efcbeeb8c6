"""The model's shape, read from the `config.json` of a Hugging Face checkpoint, without transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED_MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen2", "llama")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling; `factor` is the only value that megatron-core lets us choose."""

    factor: float


@dataclass(frozen=True)
class MoEConfig:
    """The experts that take the place of every layer's MLP."""

    num_experts: int
    top_k: int
    """Experts that each token goes through."""
    intermediate_size: int
    renormalize: bool
    """Whether the weights of a token's experts add up to 1 (else they are a part of the softmax over all experts)."""


@dataclass(frozen=True)
class HFModelConfig:
    """Sizes of a decoder, dense or with experts. Every field comes from `config.json`; nobody retypes them as flags."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope_scaling: RopeScaling | None = None
    moe: MoEConfig | None = None

    @staticmethod
    def from_dir(directory: str | Path) -> HFModelConfig:
        """Read `<directory>/config.json`.

        Raises:
            ValueError: no such directory or file, not JSON, or a model that the trainer cannot build (the message says
                which field, what it is and what is supported).
        """
        path = Path(directory) / "config.json"
        if not Path(directory).is_dir():
            raise ValueError(f"the checkpoint directory {directory} does not exist")
        if not path.is_file():
            raise ValueError(f"the checkpoint {directory} has no config.json")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ValueError(f"{path} holds no JSON object, but a {type(raw).__name__}")
        return parse_hf_config(raw, source=str(path))


def parse_hf_config(raw: dict[str, Any], *, source: str) -> HFModelConfig:
    """Turn the fields of a `config.json` into an `HFModelConfig`; `source` names the file in errors."""
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ValueError(f"{source}: model_type {model_type!r} is not supported; supported: {supported}")
    _refuse_unsupported(raw, source)
    num_heads = _int(raw, "num_attention_heads", source)
    hidden_size = _int(raw, "hidden_size", source)
    theta, scaling = _rope(raw, source)
    return HFModelConfig(
        model_type=model_type,
        vocab_size=_int(raw, "vocab_size", source),
        hidden_size=hidden_size,
        intermediate_size=_int(raw, "intermediate_size", source),
        num_layers=_int(raw, "num_hidden_layers", source),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        max_position_embeddings=int(raw.get("max_position_embeddings") or 32768),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        rope_scaling=scaling,
        moe=_moe(raw, source) if model_type == "qwen3_moe" else None,
    )


def _int(raw: dict[str, Any], key: str, source: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{source}: {key} must be a positive integer, got {value!r}")
    return value


def _moe(raw: dict[str, Any], source: str) -> MoEConfig:
    for key, only in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if (raw.get(key) or only) != only:
            raise ValueError(f"{source}: {key} = {raw[key]!r} is not supported; every layer must have experts ({only})")
    moe = MoEConfig(
        # transformers 5 writes the second name.
        num_experts=_int(raw, "num_experts" if "num_experts" in raw else "num_local_experts", source),
        top_k=_int(raw, "num_experts_per_tok", source),
        intermediate_size=_int(raw, "moe_intermediate_size", source),
        renormalize=bool(raw.get("norm_topk_prob", False)),
    )
    if moe.top_k > moe.num_experts:
        raise ValueError(f"{source}: num_experts_per_tok {moe.top_k} must not be above num_experts {moe.num_experts}")
    return moe


def _refuse_unsupported(raw: dict[str, Any], source: str) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{source}: hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(key):
            raise ValueError(f"{source}: {key} = {raw[key]!r} is not supported; only false is")


def _rope(raw: dict[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Base period and scaling. transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind != "llama3" or any(float(parameters.get(key, value)) != value for key, value in fixed.items()):
        raise ValueError(
            f"{source}: rope scaling {parameters} is not supported; supported: 'default', and 'llama3' with {fixed}"
        )
    return theta, RopeScaling(factor=float(parameters["factor"]))
