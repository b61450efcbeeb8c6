"""Optimizer state of a flat range of a parameter, where a GPU optimizer would hold the master weights itself."""

from __future__ import annotations

import torch

from miles.backends.megatron_utils.converter import param_spec
from miles.backends.megatron_utils.optimizer_state import MASTER, OptimizedParam
from miles.backends.megatron_utils.weights import LocalParam


def a_range(*, holds_master: bool) -> tuple[OptimizedParam, torch.optim.Optimizer]:
    """Elements 2 to 5 of a bf16 parameter of eight."""
    parameter = torch.nn.Parameter(torch.arange(8, dtype=torch.bfloat16))
    part = parameter.detach()[2:5] if holds_master else parameter.detach()[2:5].float()
    optimizer = torch.optim.SGD([part], lr=1.0)
    local = LocalParam("decoder.final_layernorm.weight", param_spec("decoder.final_layernorm.weight"), parameter, False)
    return OptimizedParam(local, optimizer, part, 2, None, holds_master), optimizer


def test_master_weights_that_the_optimizer_holds_come_from_its_state_and_go_back_there() -> None:
    param, optimizer = a_range(holds_master=True)
    assert param.fields == {}
    param.restore({MASTER: torch.arange(8.0) + 0.001, "exp_avg": torch.arange(8.0)}, {"step": 3.0})
    state = optimizer.state[param.optimized]
    assert state["master_param"].tolist() == torch.tensor([2.001, 3.001, 4.001]).tolist()
    assert state["exp_avg"].tolist() == [2.0, 3.0, 4.0] and float(state["step"]) == 3.0
    assert param.fields.keys() == {MASTER, "exp_avg"} and param.scalars == {"step": 3.0}


def test_master_weights_beside_the_optimizer_are_written_in_place() -> None:
    param, optimizer = a_range(holds_master=False)
    param.restore({MASTER: torch.arange(8.0) + 0.001}, {})
    assert param.optimized is not None
    assert param.optimized.tolist() == torch.tensor([2.001, 3.001, 4.001]).tolist() and not optimizer.state
    assert param.fields.keys() == {MASTER}
