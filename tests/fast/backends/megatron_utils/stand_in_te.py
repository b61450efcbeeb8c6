"""Transformer Engine's modules in plain PyTorch, with its names and those of its parameters: as much of version 2.9 as
megatron-core's GPT layers use. So these layers, which are megatron-core's own, run where Transformer Engine cannot.
Arguments are spelled out: what the real modules would refuse is refused here.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def _shard(tensor: torch.Tensor, parallel_mode: str | None) -> nn.Parameter:
    """A parameter with the marks that Transformer Engine's layers give theirs, also where one rank has all of it."""
    parameter = nn.Parameter(tensor)
    dim = 1 if parallel_mode == "row" else 0
    vars(parameter).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)
    return parameter


class RMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float,
        sequence_parallel: bool,
        params_dtype: Any,
        zero_centered_gamma: bool,
        device: Any,
    ) -> None:
        super().__init__()
        assert not zero_centered_gamma
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        get_rng_state_tracker: Any,
        init_method: Any,
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        device: Any,
        rng_tracker_name: str | None = None,
        ub_name: str | None = None,
    ) -> None:
        super().__init__()
        assert tp_size == 1 and not return_bias and not fuse_wgrad_accumulation
        options = {"dtype": params_dtype, "device": device}
        self.weight = _shard(torch.empty(out_features, in_features, **options), parallel_mode)
        self.bias = _shard(torch.zeros(out_features, **options), parallel_mode) if bias else None

    def forward(self, inputs: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return F.linear(inputs, self.weight, self.bias)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        *args: Any,
        eps: float,
        normalization: str,
        return_layernorm_output: bool,
        zero_centered_gamma: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, *args, **kwargs)
        assert normalization == "RMSNorm" and not zero_centered_gamma and not return_layernorm_output
        self.eps = eps
        weight = torch.ones(in_features, dtype=self.weight.dtype, device=kwargs["device"])
        self.layer_norm_weight = nn.Parameter(weight)
        self.layer_norm_weight.sequence_parallel = kwargs["sequence_parallel"]  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        shape = self.layer_norm_weight.shape
        return super().forward(F.rms_norm(inputs, shape, self.layer_norm_weight, self.eps))


class GroupedLinear(nn.Module):
    """Linear layers without bias, of the same sizes."""

    def __init__(self, num_gemms: int, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            linear = Linear(*args, **kwargs)
            assert linear.bias is None
            self.register_parameter(f"weight{i}", linear.weight)

    def forward(
        self, inputs: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        parts = inputs.split(m_splits)
        assert len(parts) == self.num_gemms
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)])


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int,
        attention_dropout: float,
        attn_mask_type: str,
        sequence_parallel: bool,
        tp_size: int,
        get_rng_state_tracker: Any,
        tp_group: Any,
        layer_number: int,
        attention_type: str,
        softmax_scale: float | None,
    ) -> None:
        super().__init__()
        assert attn_mask_type == "causal" and attention_type == "self" and attention_dropout == 0

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        qkv_format: str,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        cu_seqlens_q_padded: torch.Tensor | None,
        cu_seqlens_kv_padded: torch.Tensor | None,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        attn_mask_type: str,
    ) -> torch.Tensor:
        """[tokens, heads, dim] of each -> [tokens, heads * dim]."""
        assert (qkv_format, attn_mask_type, attention_mask) == ("thd", "padding_causal", None)
        assert cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.device == query.device
        assert cu_seqlens_q_padded is None and cu_seqlens_kv is cu_seqlens_q
        lengths = cu_seqlens_q.diff().tolist()
        assert sum(lengths) == len(query) and max(lengths) == max_seqlen_q == max_seqlen_kv
        parts = zip(
            *(tensor.transpose(0, 1)[None].split(lengths, dim=2) for tensor in (query, key, value)), strict=True
        )
        attended = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
        return torch.cat(attended, dim=2)[0].transpose(0, 1).flatten(1)


class _Fp8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def install() -> None:
    """Before megatron-core is imported: it looks once."""
    names = ("", ".pytorch", ".pytorch.distributed", ".pytorch.fp8", ".pytorch.router", ".pytorch.tensor")
    root, pytorch, distributed, fp8, router, tensor = modules = [
        ModuleType("transformer_engine" + name) for name in names
    ]
    sys.modules |= {module.__name__: module for module in modules}
    root.__path__ = pytorch.__path__ = []
    vars(root).update(
        __spec__=ModuleSpec(root.__name__, None),
        __version__="2.9.0",
        pytorch=pytorch,
        common=SimpleNamespace(recipe=SimpleNamespace(DelayedScaling=object)),
    )
    layers = (RMSNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention)
    vars(pytorch).update({layer.__name__: layer for layer in layers})
    vars(pytorch).update(ops=SimpleNamespace(Sequential=None, FusibleOperation=None), distributed=distributed)
    vars(distributed).update(CudaRNGStatesTracker=object, activation_recompute_forward=nullcontext)
    vars(fp8).update(FP8GlobalStateManager=_Fp8GlobalStateManager, fp8_autocast=nullcontext)
    unused = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
    vars(tensor).update(QuantizedTensor=type("QuantizedTensor", (), {}))
    vars(router).update(dict.fromkeys(unused))
