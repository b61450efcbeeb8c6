"""Loading a Hugging Face model for the engine, and running one packed pass through it."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from miles.backends.embedded_engine.attention import ATTENTION_NAME, register_attention
from miles.backends.embedded_engine.kv_cache import KVShape

if TYPE_CHECKING:
    from miles.backends.embedded_engine.step_plan import StepPlan

DIRECT_CLASSES = {
    "Qwen3ForCausalLM": "transformers.models.qwen3.modeling_qwen3",
    "Qwen3MoeForCausalLM": "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "Qwen2ForCausalLM": "transformers.models.qwen2.modeling_qwen2",
    "LlamaForCausalLM": "transformers.models.llama.modeling_llama",
}
"""Imported on their own, which is seconds faster than the auto classes."""

LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
DEFAULT_CONTEXT_LENGTH = 2048


@dataclass(frozen=True)
class ModelInfo:
    """What the rest of the engine needs to know of a model."""

    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    context_length: int
    kv_shape: KVShape


class EngineModel:
    """A causal language model whose attention reads and writes the engine's KV cache."""

    def __init__(self, module: torch.nn.Module, info: ModelInfo) -> None:
        self.module = module
        self.info = info

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """[plan.logits_rows, vocab], and the keys and values of all the pass's tokens written to the cache."""
        output = self.module(
            input_ids=plan.input_ids,
            position_ids=plan.position_ids,
            use_cache=False,
            logits_to_keep=torch.arange(plan.logits_rows, device=plan.input_ids.device),
            step_plan=plan,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def load_model(
    directory: str, *, dtype: torch.dtype, device: torch.device, context_length: int | None = None
) -> EngineModel:
    """Load the model in `directory` (config.json and *.safetensors; no code from it is run, nothing is downloaded).

    Raises ValueError where the directory is not such a model or the model needs what the engine does not have.
    """
    architecture = _architecture(directory)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    register_attention()
    module, missing = _from_pretrained(architecture, directory, dtype)
    if missing:
        raise ValueError(f"--model-path {directory}: the checkpoint lacks {', '.join(sorted(missing)[:5])}")
    config = module.config.get_text_config()
    _refuse_unsupported(directory, config)
    module.eval().requires_grad_(False).to(device)
    longest = getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT_LENGTH
    if context_length is not None and context_length > longest:
        raise ValueError(f"--context-length must be at most the model's {longest} positions, got {context_length}")
    heads = config.num_attention_heads
    info = ModelInfo(
        model_type=config.model_type,
        architectures=(architecture,),
        vocab_size=module.get_output_embeddings().weight.shape[0],
        context_length=context_length or longest,
        kv_shape=KVShape(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=dtype,
            device=device,
        ),
    )
    return EngineModel(module, info)


def _architecture(directory: str) -> str:
    file = Path(directory) / "config.json"
    if not file.is_file():
        raise ValueError(f"--model-path {directory}: there is no config.json")
    architectures = json.loads(file.read_text(encoding="utf-8")).get("architectures") or []
    if not architectures:
        raise ValueError(f"--model-path {directory}: config.json names no architecture")
    return str(architectures[0])


def _from_pretrained(architecture: str, directory: str, dtype: torch.dtype) -> tuple[Any, set[str]]:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if architecture in DIRECT_CLASSES:
        model_class = getattr(importlib.import_module(DIRECT_CLASSES[architecture]), architecture)
        extra = {}
    else:
        from transformers import AutoModelForCausalLM as model_class

        extra = {"trust_remote_code": False}
    try:
        module, loading = model_class.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **extra,
        )
    except OSError as error:
        raise ValueError(f"--model-path {directory}: {error}") from error
    return module, set(loading["missing_keys"])


def _refuse_unsupported(directory: str, config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    rope = getattr(config, "rope_parameters", None) or {}
    problems = [
        kinds and f"layers of type {', '.join(sorted(kinds))}",
        not hasattr(config, "layer_types") and window and "sliding-window attention",
        rope.get("rope_type") in LENGTH_DEPENDENT_ROPE and f"{rope.get('rope_type')} position embeddings",
        getattr(config, "attn_logit_softcapping", None) and "softcapped attention",
        getattr(config, "is_encoder_decoder", False) and "an encoder",
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise ValueError(
            f"--model-path {directory}: the embedded engine does not support {' and '.join(found)}; "
            "use --rollout-engine sglang"
        )
