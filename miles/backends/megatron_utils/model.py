"""A megatron-core GPT model built from a Hugging Face config."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.backends.megatron_utils.attention import PackedAttention
from miles.backends.megatron_utils.converter import Split, padded_vocab_size, param_spec
from miles.backends.megatron_utils.norm import RMSNorm
from miles.utils.devices import transformer_engine_installed

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron.core.transformer.spec_utils import ModuleSpec

    from miles.backends.megatron_utils.hf_config import HFModelConfig
    from miles.backends.megatron_utils.layout import ParallelLayout


def use_transformer_engine(args: Namespace) -> bool:
    """Transformer Engine's layers on a GPU where they are installed, unless `--transformer-impl local`."""
    wanted = getattr(args, "transformer_impl", None) != "local"
    return wanted and torch.cuda.is_available() and transformer_engine_installed()


def require_working_transformer_engine() -> None:
    """Raise ValueError where Transformer Engine is installed and megatron-core cannot use it: its layers would be
    stand-ins that fail in obscure ways."""
    from megatron.core.extensions import transformer_engine as extension

    if extension.HAVE_TE:
        return
    reason = "it has none of the modules that megatron-core looks for"
    for module in ("transformer_engine.pytorch", "transformer_engine.pytorch.fp8"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            reason = str(error)
            break
    raise ValueError(
        f"the package transformer_engine is installed, but this megatron-core cannot use it: {reason}. Instead: a "
        "version that fits (docs/user-guide/cluster.md), or --transformer-impl local"
    )


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
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_backend=_attention_backend(args),
        attention_softmax_in_fp32=True,
        variable_seq_lengths=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        cuda_graph_scope=[],
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        deterministic_mode=bool(getattr(args, "deterministic_mode", False)),
        **_recompute_fields(args),
        **_parallel_fields(args, layout),
        **_moe_fields(hf, args),
    )


def _recompute_fields(args: Namespace) -> dict[str, Any]:
    granularity = getattr(args, "recompute_granularity", None)
    if granularity != "full":  # the other two have no effect then, and megatron-core refuses them
        return {"recompute_granularity": granularity}
    return {
        "recompute_granularity": granularity,
        "recompute_method": getattr(args, "recompute_method", None),
        "recompute_num_layers": getattr(args, "recompute_num_layers", None),
    }


def _attention_backend(args: Namespace) -> AttnBackend:
    chosen = getattr(args, "attention_backend", None) if use_transformer_engine(args) else None
    return AttnBackend[chosen or "auto"]


def _parallel_fields(args: Namespace, layout: ParallelLayout) -> dict[str, Any]:
    interleaved = layout.virtual > 1
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if interleaved else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        "num_layers_in_first_pipeline_stage": getattr(args, "decoder_first_pipeline_num_layers", None),
        "num_layers_in_last_pipeline_stage": getattr(args, "decoder_last_pipeline_num_layers", None),
        # With two ranks a batch of sends and receives would hold two of each between the same pair.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Interleaved stages let go of what they still send. Streams keep it for NCCL; gloo sends from where it was.
        "deallocate_pipeline_outputs": layout.pipeline > 1 and (torch.cuda.is_available() or not interleaved),
    }


def _moe_fields(hf: HFModelConfig, args: Namespace) -> dict[str, Any]:
    dispatcher = getattr(args, "moe_token_dispatcher_type", None)
    # The dispatcher "allgather" refuses micro-batches of different lengths.
    fields: dict[str, Any] = {"moe_token_dispatcher_type": "flex" if dispatcher == "flex" else "alltoall"}
    if hf.moe is None:
        return fields
    if dispatcher == "flex" and not torch.cuda.is_available():
        raise ValueError("--moe-token-dispatcher-type flex needs GPUs. Instead: alltoall")
    if not hasattr(moe_utils, "te_general_gemm"):  # the router asks for it, but only Transformer Engine has it
        moe_utils.te_general_gemm = None
    return fields | {
        "num_moe_experts": hf.moe.num_experts,
        "moe_router_topk": hf.moe.top_k,
        "moe_ffn_hidden_size": hf.moe.intermediate_size,
        "moe_router_pre_softmax": not hf.moe.renormalize,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": getattr(args, "moe_router_dtype", None) or "fp32",
        "moe_router_load_balancing_type": getattr(args, "moe_router_load_balancing_type", None) or "aux_loss",
        "moe_aux_loss_coeff": getattr(args, "moe_aux_loss_coeff", None) or 0.0,
        "moe_grouped_gemm": use_transformer_engine(args),
        "moe_permute_fusion": use_transformer_engine(args) and bool(getattr(args, "moe_permute_fusion", False)),
        "moe_enable_deepep": bool(getattr(args, "moe_enable_deepep", False)),
    }


def model_spec(
    hf: HFModelConfig, args: Namespace, config: TransformerConfig, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """The layers of one pipeline stage."""
    num_experts = hf.moe.num_experts if hf.moe else None
    if use_transformer_engine(args):
        require_working_transformer_engine()
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts, moe_grouped_gemm=num_experts is not None, qk_layernorm=hf.qk_norm
        )
    layer = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=hf.qk_norm, normalization="RMSNorm")
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if hf.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage), layer_norm=RMSNorm)


def build_model(hf: HFModelConfig, args: Namespace, layout: ParallelLayout) -> list[torch.nn.Module]:
    """The stages of this rank with uninitialised weights, on its device; wrapped for bf16 where asked."""
    config = transformer_config(hf, args, layout)
    stages = [None] if layout.virtual == 1 else list(range(layout.virtual))
    return [_build_stage(hf, args, layout, config, stage) for stage in stages]


def _build_stage(
    hf: HFModelConfig, args: Namespace, layout: ParallelLayout, config: TransformerConfig, vp_stage: int | None
) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core warns about how its own modules call each other
        model: Any = GPTModel(
            config=config,
            transformer_layer_spec=model_spec(hf, args, config, vp_stage),
            vocab_size=padded_vocab_size(hf.vocab_size, layout.tensor),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=True,
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=hf.rope_theta,  # type: ignore[arg-type]
            rope_scaling=hf.rope_scaling is not None,
            rope_scaling_factor=hf.rope_scaling.factor if hf.rope_scaling else 8.0,
            vp_stage=vp_stage,
        )
    _mark_shards(model, layout)
    if torch.cuda.is_available():
        model = model.cuda()
    return Float16Module(config, model) if config.bf16 else model


def _mark_shards(model: torch.nn.Module, layout: ParallelLayout) -> None:
    """Tell megatron-core which parameters are shards: it counts the others once in the gradient norm. Its layers do so
    only where they initialise their weights, which ours leave to the checkpoint.

    And which are reduced over the ranks that have the same part of an expert: it asks for several expert-parallel
    ranks, but these are not the data-parallel ones either where experts are split otherwise than the rest."""
    for name, parameter in model.named_parameters():
        spec = param_spec(name)
        if not spec.split.is_whole and not hasattr(parameter, "tensor_model_parallel"):
            dim = 1 if spec.split is Split.COLUMNS else 0
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
        if spec.is_expert and layout.expert_tensor != layout.tensor:
            parameter.allreduce = False  # type: ignore[attr-defined]


def unwrap(model: torch.nn.Module) -> Any:
    """The GPTModel inside data-parallel and precision wrappers."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model
