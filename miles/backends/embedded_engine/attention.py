"""Attention over the engine's own KV cache, plugged into Hugging Face models as an attention implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from miles.backends.embedded_engine.step_plan import DecodeSlice, PromptBlock, StepPlan

ATTENTION_NAME = "miles_embedded_engine"


def register_attention() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers. Repeating it does nothing new."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, cached_attention)


def cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    step_plan: StepPlan,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer for one packed pass; writes its keys and values into the cache first.

    query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim] -> [1, tokens, heads, head_dim].
    """
    if not (attention_mask is None and sliding_window is None and softcap is None and s_aux is None):
        raise ValueError(
            "the embedded engine has plain causal attention only (no sliding window, soft cap, sinks or bias); "
            "use --rollout-engine sglang"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    head_dim = keys.shape[-1]
    output = torch.empty(queries.shape, dtype=query.dtype, device=query.device)
    for write in step_plan.writes:
        cached_keys, cached_values = write.pool.layers[layer]
        cached_keys.index_copy_(0, write.write_at, keys.index_select(0, write.tokens).view(-1, head_dim))
        cached_values.index_copy_(0, write.write_at, values.index_select(0, write.tokens).view(-1, head_dim))
    for part in step_plan.decode:
        cached_keys, cached_values = part.pool.layers[layer]
        stop = part.start + part.rows
        cached_keys.index_copy_(0, part.write_at, keys[part.start : stop].reshape(-1, head_dim))
        cached_values.index_copy_(0, part.write_at, values[part.start : stop].reshape(-1, head_dim))
        output[part.start : stop] = _decode(part, layer, queries[part.start : stop], scaling)
    for block in step_plan.blocks:
        output[block.start : block.stop] = _prompt(block, query[0], key[0], value[0], scaling)
    return output[None], None


def _decode(part: DecodeSlice, layer: int, queries: torch.Tensor, scaling: float) -> torch.Tensor:
    """One query per request against its row of the cache. [rows, heads, head_dim] -> the same.

    The query heads that share a key-value head stand where several query positions would, so no key is repeated.
    """
    rows, heads, head_dim = queries.shape
    data = part.pool.data[layer]
    kv_heads = data.shape[2]
    keys = data[0, : part.rows, :, : part.longest].view(rows * kv_heads, part.longest, head_dim)
    values = data[1, : part.rows, :, : part.longest].view(rows * kv_heads, part.longest, head_dim)
    grouped = queries.reshape(rows * kv_heads, heads // kv_heads, head_dim)
    if queries.dtype == torch.float32 and queries.device.type == "cpu":
        # Three kernels beat the fused one on a CPU core where a query is one position long (by a fifth, measured).
        scores = torch.baddbmm(part.mask, grouped, keys.transpose(1, 2), alpha=scaling)
        return torch.bmm(torch.softmax(scores, dim=-1), values).view(rows, heads, head_dim)
    attended = F.scaled_dot_product_attention(
        grouped[:, None], keys[:, None], values[:, None], attn_mask=part.mask[:, None], scale=scaling
    )
    return attended.view(rows, heads, head_dim)


def _prompt(
    block: PromptBlock, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Causal attention within each prompt of the block.

    [heads, tokens of the pass, head_dim] -> [tokens of the block, heads, head_dim]
    """
    attended = F.scaled_dot_product_attention(
        _as_block(block, query),
        _as_block(block, key),
        _as_block(block, value),
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[0] != key.shape[0],
    )
    tokens = attended.transpose(1, 2).reshape(block.count * block.longest, query.shape[0], query.shape[-1])
    return tokens if block.valid is None else tokens.index_select(0, block.valid)


def _as_block(block: PromptBlock, states: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, head_dim] -> [count, heads, longest, head_dim]."""
    heads, _, head_dim = states.shape
    chosen = states[:, block.start : block.stop] if block.gather is None else states.index_select(1, block.gather)
    return chosen.reshape(heads, block.count, block.longest, head_dim).transpose(0, 1)
