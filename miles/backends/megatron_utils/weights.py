"""Moves weights from Hugging Face checkpoints into this rank's part of the megatron-core model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state

from miles.backends.megatron_utils.converter import ParamSpec, hf_names, param_spec, shard
from miles.backends.megatron_utils.model import unwrap
from miles.backends.megatron_utils.safetensors_io import SafetensorsReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from miles.backends.megatron_utils.hf_config import HFModelConfig

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")


@dataclass(frozen=True)
class LocalParam:
    """A parameter of this rank: all of it, or its shard."""

    name: str
    """megatron-core's, with the number that the layer has in the whole model; the same on all ranks that share it."""
    spec: ParamSpec
    parameter: torch.nn.Parameter
    is_copy: bool
    """The output layer of a tied model on a last pipeline stage of its own: a copy of the embedding."""

    @property
    def tensor_rank(self) -> int:
        """This rank's place among those that share the parameter."""
        if self.spec.is_expert:
            return int(parallel_state.get_expert_tensor_parallel_rank())
        return int(parallel_state.get_tensor_model_parallel_rank())

    @property
    def tensor_size(self) -> int:
        """How many ranks share the parameter."""
        if self.spec.is_expert:
            return int(parallel_state.get_expert_tensor_parallel_world_size())
        return int(parallel_state.get_tensor_model_parallel_world_size())


def local_params(stages: Sequence[torch.nn.Module], hf: HFModelConfig) -> Iterator[LocalParam]:
    """The parameters of this rank's pipeline stages, in the model's order."""
    expert_offset = 0
    if hf.moe is not None:
        ranks = parallel_state.get_expert_model_parallel_world_size()
        expert_offset = hf.moe.num_experts // ranks * parallel_state.get_expert_model_parallel_rank()
    for stage in stages:
        model = unwrap(stage)
        layers = model.decoder.layers
        layer_offset = layers[0].layer_number - 1 if len(layers) else 0
        for name, parameter in model.named_parameters():
            spec = param_spec(name, layer_offset=layer_offset, expert_offset=expert_offset, tied=hf.tie_word_embeddings)
            yield LocalParam(
                name=_LAYER.sub(lambda m: f"{m[1]}{int(m[2]) + layer_offset}{m[3]}", name),  # noqa: B023 (used at once)
                spec=spec,
                parameter=parameter,
                is_copy=hf.tie_word_embeddings and name == "output_layer.weight",
            )


@torch.no_grad()
def load_hf_weights(stages: Sequence[torch.nn.Module], directory: str | Path, hf: HFModelConfig) -> None:
    """Fill every parameter of this rank from the safetensors files of `directory`.

    Raises:
        ValueError: a tensor is missing, has another shape than `config.json` says, or belongs to no parameter.
    """
    with SafetensorsReader(directory) as reader:
        for local in local_params(stages, hf):
            tensors = [reader[name] for name in local.spec.hf_names]
            own = shard(local.spec, tensors, hf, rank=local.tensor_rank, size=local.tensor_size)
            if own.shape != local.parameter.shape:
                raise ValueError(
                    f"the checkpoint {directory}: {' + '.join(local.spec.hf_names)} has shape {tuple(own.shape)}, "
                    f"config.json asks for {tuple(local.parameter.shape)}"
                )
            local.parameter.copy_(own)
        known = set(hf_names(hf))
        unused = sorted(n for n in reader.names - known if not n.endswith(".inv_freq") and n != "lm_head.weight")
    if unused:
        raise ValueError(f"the checkpoint {directory} has tensors that its config.json has no place for: {unused[:5]}")
