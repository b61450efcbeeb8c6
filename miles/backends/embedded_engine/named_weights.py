"""A model's weights by the names that checkpoints and trainers use, also where transformers fuses what they name apart.

    in the model                                              in checkpoints, and from the trainer
    ...mlp.experts.gate_up_proj [experts, 2 x width, hidden]  ...mlp.experts.E.{gate,up}_proj.weight  [width, hidden]
    ...mlp.experts.down_proj    [experts, hidden, width]      ...mlp.experts.E.down_proj.weight       [hidden, width]

Every other parameter has one name. Older versions of transformers fuse nothing, and then this does nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

_FUSED = re.compile(r"(?P<experts>.*\.experts)\.(?P<kind>gate_up|down)_proj")
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.weight")


def named_weights(module: torch.nn.Module, *, remove_duplicate: bool = True) -> dict[str, torch.Tensor]:
    """Name -> the parameter itself, or a view of the one that it is a part of.

    Tied weights have one name with `remove_duplicate`, else each of theirs, for the same object.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=remove_duplicate):
        fused = _FUSED.fullmatch(name)
        if fused is None or parameter.dim() != 3:
            weights[name] = parameter
        else:
            weights |= dict(_parts(fused["experts"], fused["kind"], parameter.data))
    return weights


def _parts(experts: str, kind: str, fused: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for expert, matrix in enumerate(fused):
        if kind == "down":
            yield f"{experts}.{expert}.down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{experts}.{expert}.gate_proj.weight", gate
            yield f"{experts}.{expert}.up_proj.weight", up


def swap_weights(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Make `weights` the module's. A parameter gets the tensor itself; one with parts gets a new tensor, made of the
    given parts and the old others, so that whoever holds the old one may go on reading it."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    fused: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name in parameters:
            parameters[name].data = tensor
            continue
        part = _EXPERT.fullmatch(name)
        if part is None:
            raise KeyError(name)
        owner = f"{part['experts']}.{'down' if part['kind'] == 'down' else 'gate_up'}_proj"
        if owner not in fused:
            fused[owner] = parameters[owner].data.clone()
        matrix = fused[owner][int(part["expert"])]
        half = {"gate": 0, "up": 1}.get(part["kind"])
        (matrix if half is None else matrix.chunk(2)[half]).copy_(tensor)
    for name, tensor in fused.items():
        parameters[name].data = tensor
