from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from miles.backends.embedded_engine.errors import ControlError
from miles.backends.embedded_engine.weights import TensorSpec, WeightReceiver, parse_specs

if TYPE_CHECKING:
    from pathlib import Path

PARAMETERS = {"a.weight": torch.zeros(3, 4), "b.weight": torch.zeros(5), "c.weight": torch.zeros(2, 2)}
BRACKET_MESSAGE = "must run between begin_weight_update"


@pytest.fixture
def receiver() -> WeightReceiver:
    return WeightReceiver(PARAMETERS, timeout=10)


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator).to(dtype) for name, t in PARAMETERS.items()}


def write_checkpoint(directory: Path, content: dict[str, torch.Tensor], shards: int = 1) -> str:
    names = sorted(content)
    for i in range(shards):
        save_file({name: content[name] for name in names[i::shards]}, directory / f"model-{i}.safetensors")
    return str(directory)


def test_a_directory_is_read_whole(receiver: WeightReceiver, tmp_path: Path) -> None:
    new = tensors(1)
    staged = receiver.read_directory(write_checkpoint(tmp_path, new, shards=2))
    assert staged.tensors.keys() == new.keys()
    assert all(torch.equal(staged.tensors[name], new[name]) for name in new)


def test_weights_are_cast_to_the_models_type(receiver: WeightReceiver, tmp_path: Path) -> None:
    new = tensors(1, torch.bfloat16)
    staged = receiver.read_directory(write_checkpoint(tmp_path, new))
    assert all(tensor.dtype == torch.float32 for tensor in staged.tensors.values())


def test_unfit_directories_are_refused(receiver: WeightReceiver, tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="Failed to get weights iterator"):
        receiver.read_directory(str(tmp_path / "nowhere"))
    (tmp_path / "model.safetensors").write_bytes(b"no such format")
    with pytest.raises(ControlError, match="Failed to get weights iterator"):
        receiver.read_directory(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ControlError, match=r"no parameter 'd\.weight'"):
        receiver.read_directory(write_checkpoint(tmp_path, tensors(1) | {"d.weight": torch.zeros(1)}))
    with pytest.raises(ControlError, match=r"a.weight must have shape \[3, 4\], got \[4, 3\]"):
        receiver.read_directory(write_checkpoint(tmp_path, tensors(1) | {"a.weight": torch.zeros(4, 3)}))


def test_a_directory_that_lacks_weights_is_refused(receiver: WeightReceiver, tmp_path: Path) -> None:
    new = tensors(1)
    del new["b.weight"]
    with pytest.raises(ControlError, match=r"lacks b.weight"):
        receiver.read_directory(write_checkpoint(tmp_path, new))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.float64])
def test_a_directory_with_another_type_is_refused(receiver: WeightReceiver, tmp_path: Path, dtype: torch.dtype) -> None:
    wrong = {"b.weight": torch.zeros(5, dtype=dtype)}
    with pytest.raises(ControlError, match=r"b.weight must be of dtype float16, bfloat16, float32, got"):
        receiver.read_directory(write_checkpoint(tmp_path, tensors(1) | wrong))


def test_a_directory_is_not_read_within_a_bracket(receiver: WeightReceiver, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tensors(1))
    receiver.begin("all")
    with pytest.raises(ControlError, match="must not run between begin_weight_update"):
        receiver.read_directory(directory)
    receiver.end()
    assert receiver.read_directory(directory).tensors


def test_tied_weights_may_come_under_either_name(tmp_path: Path) -> None:
    shared = torch.zeros(3, 4)
    receiver = WeightReceiver({"embed.weight": shared, "head.weight": shared}, timeout=10)
    new = torch.ones(3, 4)
    for name in ("embed.weight", "head.weight"):
        directory = tmp_path / name
        directory.mkdir()
        staged = receiver.read_directory(write_checkpoint(directory, {name: new}))
        assert staged.tensors.keys() == {"embed.weight"}


def test_the_bracket_is_enforced(receiver: WeightReceiver) -> None:
    spec = [TensorSpec("b.weight", torch.float32, (5,))]
    with pytest.raises(ControlError, match=BRACKET_MESSAGE):
        receiver.receive(spec, group_name="wg", load_format=None, version=None)
    with pytest.raises(ControlError, match="without begin_weight_update"):
        receiver.end()
    with pytest.raises(ControlError, match="selector must be one of"):
        receiver.begin("some")
    receiver.begin("all")
    with pytest.raises(ControlError, match="twice"):
        receiver.begin("all")
    with pytest.raises(ControlError, match=r"Group wrong not in \[\]"):
        receiver.receive(spec, group_name="wrong", load_format=None, version=None)
    assert receiver.end().tensors == {}


def test_unknown_groups_cannot_be_destroyed(receiver: WeightReceiver) -> None:
    with pytest.raises(ControlError, match=r"The group to be destroyed does not exist\."):
        receiver.destroy_group("wg")


def test_specs_are_parsed() -> None:
    assert parse_specs(["a"], ["bfloat16"], [[2, 3]]) == [TensorSpec("a", torch.bfloat16, (2, 3))]
    assert parse_specs(["a"], ["torch.float32"], [[]])[0].nbytes == 4
    for dtype in ("nn", "bool", "int64", "complex64", "torch.float64", "uint8"):
        with pytest.raises(ControlError, match=f"dtypes must be float16, bfloat16, float32, got '{dtype}'"):
            parse_specs(["a"], [dtype], [[2]])
    with pytest.raises(ControlError, match="equally long, got 1, 2 and 1"):
        parse_specs(["a"], ["float32", "float32"], [[2]])
