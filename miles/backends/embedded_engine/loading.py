"""From the configuration to a scheduler that is ready to step. Imports torch and transformers: seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles.backends.embedded_engine.generate_body import ModelLimits
from miles.backends.embedded_engine.kv_cache import SHORTEST_CLASS, KVCache
from miles.backends.embedded_engine.memory import default_total_tokens
from miles.backends.embedded_engine.model import load_model
from miles.backends.embedded_engine.named_weights import named_weights
from miles.backends.embedded_engine.request import Request
from miles.backends.embedded_engine.sampling_params import SamplingParams
from miles.backends.embedded_engine.scheduler import Scheduler
from miles.backends.embedded_engine.service import Loaded
from miles.backends.embedded_engine.step_plan import plan_step
from miles.backends.embedded_engine.tokenizer import end_token_ids, load_tokenizer
from miles.backends.embedded_engine.weights import WeightReceiver

if TYPE_CHECKING:
    from miles.backends.embedded_engine.config import EngineConfig
    from miles.backends.embedded_engine.model import EngineModel


def load(config: EngineConfig) -> tuple[Loaded, Scheduler]:
    """Raises ValueError naming the flag where the model cannot be served."""
    device = _device(config.device)
    model = load_model(
        config.model_path,
        dtype=getattr(torch, config.dtype),
        device=device,
        context_length=config.context_length,
    )
    check_attention(model)
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
            named_weights(model.module, remove_duplicate=False), timeout=config.weight_update_timeout
        ),
        model_path=config.model_path,
        served_model_name=config.served_model_name or config.model_path,
        max_total_tokens=total,
    )
    return loaded, scheduler


def check_attention(model: EngineModel) -> None:
    """Run one pass, which also warms up, and see that every layer put its keys into the cache.

    Raises ValueError for a model whose attention does not go through transformers' attention interface: it would
    answer, but wrongly.
    """
    cache = KVCache(model.info.kv_shape, context_length=SHORTEST_CLASS, max_total_tokens=SHORTEST_CLASS)
    request = Request("warm-up", [0] * 4, SamplingParams(), max_new_tokens=1, end_ids=frozenset(), seed_state=0)
    cache.join(request)
    assert request.pool is not None
    request.pool.data.fill_(torch.nan)
    shape = model.info.kv_shape
    model.logits(plan_step(cache, [request], kv_heads=shape.kv_heads, dtype=shape.dtype))
    untouched = request.pool.data[:, 0, request.row, :, : request.num_tokens].isnan().flatten(1).all(dim=1)
    if untouched.any():
        raise ValueError(
            f"the embedded engine does not support {', '.join(model.info.architectures)}: "
            f"{int(untouched.sum())} of its {shape.layers} layers keep their attention to themselves; "
            "use --rollout-engine sglang"
        )


def _device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
