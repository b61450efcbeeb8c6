"""Tiny models, arguments and rollouts for the trainer's tests."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 64
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-tied": {**_COMMON, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3-untied": {**_COMMON, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "qwen2-tied": {**_COMMON, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-untied": {**_COMMON, "model_type": "qwen2", "tie_word_embeddings": False},
    "llama-untied": {**_COMMON, "model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 4},
    "qwen3-deep-tied": {  # for pipelines; the odd vocabulary does not divide among tensor-parallel ranks
        **_COMMON,
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "num_hidden_layers": 4,
        "vocab_size": VOCAB + 1,
    },
    "qwen2-deep-untied": {
        **_COMMON,
        "model_type": "qwen2",
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
    },
    "qwen3-moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "llama3-rope": {
        **_COMMON,
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
_ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}


def hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor of such a model, written down independently of the converter."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    rows = {"q": config["num_attention_heads"] * head_dim}
    rows["k"] = rows["v"] = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        for p, n in rows.items():
            shapes[f"{layer}self_attn.{p}_proj.weight"] = (n, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{layer}self_attn.{p}_proj.bias"] = (n,)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, rows["q"])
        if config["model_type"].startswith("qwen3"):
            shapes[layer + "self_attn.q_norm.weight"] = shapes[layer + "self_attn.k_norm.weight"] = (head_dim,)
        mlps = [layer + "mlp."]
        if config["model_type"] == "qwen3_moe":
            inner = config["moe_intermediate_size"]
            shapes[layer + "mlp.gate.weight"] = (config["num_experts"], hidden)
            mlps = [f"{layer}mlp.experts.{expert}." for expert in range(config["num_experts"])]
        for mlp in mlps:
            shapes[mlp + "gate_proj.weight"] = shapes[mlp + "up_proj.weight"] = (inner, hidden)
            shapes[mlp + "down_proj.weight"] = (hidden, inner)
    return shapes


def write_checkpoint(directory: Path, name: str, *, seed: int = 0) -> Path:
    """A Hugging Face checkpoint of the configuration `name` with random weights, large enough to give varied logits."""
    config = CONFIGS[name]
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, shape in hf_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        tensors[key] = 1 + 0.2 * noise if "norm" in key else 0.2 * noise
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    full = {**config, "architectures": [_ARCHITECTURES[config["model_type"]]], "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(full), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    return directory


def make_args(checkpoint: Path, **overrides: Any) -> Namespace:
    """The flags that a trainer reads, with values for tests."""
    values: dict[str, Any] = {
        "hf_checkpoint": str(checkpoint),
        "load": None,
        "save": None,
        "lr": 1e-2,
        "lr_decay_style": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "clip_grad": 1.0,
        "weight_decay": 0.1,
        "num_rollout": 10,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "global_batch_size": 8,
        "micro_batch_size": 8,
        "use_dynamic_batch_size": False,
        "rollout_temperature": 1.0,
        "eps_clip": 0.2,
        "seed": 1234,
    }
    return Namespace(**{**values, **overrides})


def make_shard(seed: int, *, samples: int = 8, global_batch_size: int | None = None) -> dict[str, Any]:
    """One rank's share of a rollout: random tokens, rewards, masks and engine log-probabilities."""
    rng = random.Random(seed)
    prompts = [rng.randint(1, 6) for _ in range(samples)]
    responses = [rng.randint(1, 9) for _ in range(samples)]
    shard: dict[str, Any] = {
        "tokens": [[rng.randrange(VOCAB) for _ in range(p + r)] for p, r in zip(prompts, responses, strict=True)],
        "response_lengths": responses,
        "rewards": [rng.gauss(0, 1) for _ in range(samples)],
        "raw_reward": [float(rng.random() < 0.5) for _ in range(samples)],
        "truncated": [0] * samples,
        "sample_indices": list(range(samples)),
        "loss_masks": [[1] * (r - 1) + [rng.randrange(2)] for r in responses],
        "rollout_log_probs": [[rng.uniform(-6, -2) for _ in range(r)] for r in responses],
        "weight_versions": [["1"]] * samples,
        "global_batch_size": global_batch_size or samples,
    }
    return shard
