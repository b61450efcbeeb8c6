"""The shim moves megatron-core's tensors, and nobody else's."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from miles.backends.megatron_utils import cpu_shim

NAME = "megatron.core.shim_test"
SOURCE = """
import torch

def place():
    return torch.zeros(2, device="cuda"), torch.ones(2).cuda(), torch.ones(2).type(), torch.cuda.current_device()

def random_state():
    return torch.cuda.get_rng_state()
"""
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without CUDA")


@pytest.fixture
def module_of_megatron(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType(NAME)
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, NAME, module)
    cpu_shim.install_cpu_shim()
    return module


def test_it_refuses_to_install_where_cuda_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA is available"):
        cpu_shim.install_cpu_shim()


@cpu_only
def test_megatron_gets_its_tensors_on_the_cpu(module_of_megatron: Any) -> None:
    zeros, moved, kind, device = module_of_megatron.place()
    assert zeros.device.type == moved.device.type == device.type == "cpu"
    assert kind == "torch.cuda.FloatTensor"
    assert torch.equal(module_of_megatron.random_state(), torch.get_rng_state())
    assert cpu_shim.cpu_shim_installed() and not torch.cuda.is_available()


@cpu_only
def test_everybody_else_sees_torch_as_it_is(module_of_megatron: Any) -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(2).cuda()
    assert torch.ones(2).type() == "torch.FloatTensor"
    with torch.device("meta"):
        assert torch.arange(3).device.type == "meta", "PyTorch's device contexts still work"


@cpu_only
def test_installing_twice_is_installing_once(module_of_megatron: Any) -> None:
    type_of = torch.Tensor.type
    cpu_shim.install_cpu_shim()
    assert torch.Tensor.type is type_of
