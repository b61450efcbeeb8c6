"""From the configuration to a scheduler that is ready to step. Imports torch and transformers: seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles.backends.embedded_engine.generate_body import ModelLimits
from miles.backends.embedded_engine.kv_cache import KVCache
from miles.backends.embedded_engine.memory import default_total_tokens
from miles.backends.embedded_engine.model import load_model
from miles.backends.embedded_engine.scheduler import Scheduler
from miles.backends.embedded_engine.service import Loaded
from miles.backends.embedded_engine.tokenizer import end_token_ids, load_tokenizer
from miles.backends.embedded_engine.weights import WeightReceiver

if TYPE_CHECKING:
    from miles.backends.embedded_engine.config import EngineConfig


def load(config: EngineConfig) -> tuple[Loaded, Scheduler]:
    """Raises ValueError naming the flag where the model cannot be served."""
    device = _device(config.device)
    model = load_model(
        config.model_path,
        dtype=getattr(torch, config.dtype),
        device=device,
        context_length=config.context_length,
    )
    info = model.info
    total = config.max_total_tokens or default_total_tokens(
        info.kv_shape, context_length=info.context_length, max_running_requests=config.max_running_requests
    )
    scheduler = Scheduler(
        model,
        KVCache(info.kv_shape, context_length=info.context_length, max_total_tokens=total),
        max_running_requests=config.max_running_requests,
        max_prefill_tokens=config.max_prefill_tokens,
        version=config.weight_version,
    )
    tokenizer = load_tokenizer(config.model_path)
    loaded = Loaded(
        info=info,
        limits=ModelLimits(info.vocab_size, info.context_length, end_token_ids(config.model_path, tokenizer)),
        tokenizer=tokenizer,
        receiver=WeightReceiver(
            dict(model.module.named_parameters(remove_duplicate=False)), timeout=config.weight_update_timeout
        ),
        model_path=config.model_path,
        served_model_name=config.served_model_name or config.model_path,
        max_total_tokens=total,
    )
    return loaded, scheduler


def _device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
