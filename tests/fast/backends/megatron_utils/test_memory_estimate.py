"""The estimate's exact part against the tensors of models that are really built."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from miles.utils.memory.shape import ModelShape, count_parameters
from miles.utils.memory.training import TrainingConfig, all_stages
from tests.fast.backends.megatron_utils.tiny_models import CONFIGS, make_args, make_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron", "ignore::UserWarning:megatron")


def nbytes(tensors: Iterable[Any]) -> int:
    """Of tensors that share no memory; a step counter (a number) is none of them."""
    return sum(tensor.nbytes for tensor in tensors if tensor.dim())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-untied", "llama-untied"])
def test_weights_gradients_and_optimizer_of_a_trainer_are_exact(
    checkpoints: dict[str, Path], trainer_of: Callable[..., Any], name: str, bf16: bool
) -> None:
    args = make_args(checkpoints[name], bf16=bf16, optimizer="adam", actor_num_nodes=1, actor_num_gpus_per_node=1)
    trainer = trainer_of(args)
    trainer.train(0, make_shard(seed=0))
    shape = ModelShape.from_dir(str(checkpoints[name]))
    (expected,) = all_stages(shape, TrainingConfig.from_args(args, shape))

    stages = getattr(trainer, "_stages", None) or [trainer._model]
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    assert sum(p.numel() for p in parameters) == expected.parameters.total
    assert nbytes(parameters) == expected.weights
    assert nbytes(buffer.grad_data for stage in stages for buffer in stage.buffers) == expected.gradients
    optimizers = getattr(trainer._optimizer, "chained_optimizers", [trainer._optimizer])
    states = [
        tensor
        for each in optimizers
        for state in each.optimizer.state.values()
        for tensor in state.values()
        if hasattr(tensor, "dim")
    ]
    main = [p for each in optimizers for group in getattr(each, "fp32_from_float16_groups", []) for p in group]
    assert nbytes(states) + nbytes(main) == expected.optimizer


def test_the_count_of_experts_is_megatron_cores(checkpoints: dict[str, Path], trainer_of: Callable[..., Any]) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    trainer_of(make_args(checkpoints["qwen3-tied"]))  # megatron-core needs its groups
    raw = {
        **CONFIGS["qwen3-untied"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    shape = ModelShape.from_config(json.loads(json.dumps(raw)))
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        qk_layernorm=True,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=24,
        use_cpu_initialization=True,
        cuda_graph_scope=[],
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=4, qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=shape.vocab,
        max_sequence_length=128,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    count = count_parameters(shape)
    assert sum(p.numel() for p in model.parameters()) == count.total
    assert sum(p.numel() for n, p in model.named_parameters() if ".local_experts." in n) == count.expert
