"""Moves weights between Hugging Face checkpoints and this rank's megatron-core model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles.backends.megatron_utils.converter import param_spec, to_hf, to_mcore
from miles.backends.megatron_utils.model import unwrap
from miles.backends.megatron_utils.safetensors_io import SafetensorsReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miles.backends.megatron_utils.hf_config import HFModelConfig


@torch.no_grad()
def load_hf_weights(model: torch.nn.Module, directory: str | Path, hf: HFModelConfig) -> None:
    """Fill every parameter of `model` from the safetensors files of `directory`.

    Raises:
        ValueError: a tensor is missing, has another shape than `config.json` says, or belongs to no parameter.
    """
    used: set[str] = set()
    with SafetensorsReader(directory) as reader:
        for name, parameter in unwrap(model).named_parameters():
            spec = param_spec(name)
            merged = to_mcore(spec, [reader[hf_name] for hf_name in spec.hf_names], hf)
            if merged.shape != parameter.shape:
                raise ValueError(
                    f"the checkpoint {directory}: {' + '.join(spec.hf_names)} has shape {tuple(merged.shape)}, "
                    f"config.json asks for {tuple(parameter.shape)}"
                )
            parameter.copy_(merged)
            used.update(spec.hf_names)
        unused = sorted(n for n in reader.names - used if not n.endswith(".inv_freq") and n != "lm_head.weight")
    if unused:
        raise ValueError(f"the checkpoint {directory} has tensors that its config.json has no place for: {unused[:5]}")


def hf_named_tensors(model: torch.nn.Module, hf: HFModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face name and full tensor of every weight, in the model's order; detached views, copy what you keep.

    Tied models have no `lm_head.weight`, as in Hugging Face's files.
    """
    for name, parameter in unwrap(model).named_parameters():
        spec = param_spec(name)
        yield from zip(spec.hf_names, to_hf(spec, parameter.detach(), hf), strict=True)
