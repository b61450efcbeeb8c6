"""A megatron-core GPT model built from a Hugging Face config."""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.backends.megatron_utils.attention import PackedAttention

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron.core.transformer.spec_utils import ModuleSpec

    from miles.backends.megatron_utils.hf_config import HFModelConfig
    from miles.backends.megatron_utils.parallel import ParallelLayout


def use_transformer_engine(args: Namespace) -> bool:
    """Transformer Engine's layers on a GPU where they are installed, unless `--transformer-impl local`."""
    wanted = getattr(args, "transformer_impl", None) != "local"
    return wanted and torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def params_dtype(args: Namespace) -> torch.dtype:
    """bfloat16 with `--bf16`, else float32."""
    return torch.bfloat16 if getattr(args, "bf16", False) else torch.float32


def transformer_config(hf: HFModelConfig, args: Namespace, layout: ParallelLayout) -> TransformerConfig:
    """megatron-core's configuration of this model; every fusion that the local spec lacks is off."""
    dtype = params_dtype(args)
    return TransformerConfig(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_heads,
        num_query_groups=hf.num_kv_heads,
        kv_channels=hf.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=hf.qkv_bias,
        qk_layernorm=hf.qk_norm,
        hidden_dropout=getattr(args, "hidden_dropout", 0.0),
        attention_dropout=getattr(args, "attention_dropout", 0.0),
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # not used by dense models; the default refuses variable lengths
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        cuda_graph_scope=[],
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        recompute_granularity=getattr(args, "recompute_granularity", None),
        recompute_method=getattr(args, "recompute_method", None),
        recompute_num_layers=getattr(args, "recompute_num_layers", None),
        deterministic_mode=bool(getattr(args, "deterministic_mode", False)),
    )


def layer_spec(hf: HFModelConfig, args: Namespace) -> ModuleSpec:
    if use_transformer_engine(args):
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=hf.qk_norm)
    spec = get_gpt_layer_local_spec(qk_layernorm=hf.qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def build_model(hf: HFModelConfig, args: Namespace, layout: ParallelLayout) -> torch.nn.Module:
    """The model of this rank with uninitialised weights, on its device; wrapped for bf16 where asked."""
    config = transformer_config(hf, args, layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core warns about how its own modules call each other
        model: Any = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(hf, args),
            vocab_size=padded_vocab_size(hf.vocab_size, layout.tensor),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            parallel_output=False,
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=hf.rope_theta,  # type: ignore[arg-type]
            rope_scaling=hf.rope_scaling is not None,
            rope_scaling_factor=hf.rope_scaling.factor if hf.rope_scaling else 8.0,
        )
    if torch.cuda.is_available():
        model = model.cuda()
    return Float16Module(config, model) if config.bf16 else model


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding: the vocabulary, rounded up so that every tensor-parallel rank holds as many."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def unwrap(model: torch.nn.Module) -> Any:
    """The GPTModel inside data-parallel and precision wrappers."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model
