"""Random Qwen3 checkpoints that a CPU trains in milliseconds, with the quickstart's tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from examples.quickstart.make_base_model import make_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def make_tiny_qwen3(directory: Path, *, mixture_of_experts: bool, layers: int = 3, seed: int = 0) -> Path:
    """Three layers, so that a pipeline of three stages has one each; four experts, two of them for each token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if mixture_of_experts:
            model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
