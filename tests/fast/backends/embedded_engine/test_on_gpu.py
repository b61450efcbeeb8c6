"""Where the engine's tensors are on a GPU: the whole engine on a device that exists in name only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from miles.backends.embedded_engine.errors import ControlError
from miles.backends.embedded_engine.loading import check_attention
from miles.backends.embedded_engine.model import load_model
from miles.backends.embedded_engine.named_weights import named_weights
from miles.backends.embedded_engine.scheduler import PauseMode
from miles.backends.embedded_engine.weights import TensorSpec, WeightReceiver
from tests.fast.backends.embedded_engine.tiny import (
    char_ids,
    make_request,
    random_weights,
    run_until_done,
    scheduler_of,
)
from tests.fast.pretend_gpu import pretend_gpu

if TYPE_CHECKING:
    from pathlib import Path

    from miles.backends.embedded_engine.request import Request
    from miles.backends.embedded_engine.scheduler import Scheduler

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def open_scheduler(directory: Path, device: torch.device) -> Scheduler:
    model = load_model(str(directory), dtype=torch.float32, device=device)
    check_attention(model)
    return scheduler_of(model, max_running_requests=8, max_total_tokens=4096, max_prefill_tokens=64)


def requests() -> list[Request]:
    """Every way of choosing a token, prompts of several lengths (shared, scored), rows that outgrow their class."""
    some: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "max_new_tokens": 100},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"frequency_penalty": 0.5, "presence_penalty": 0.1, "repetition_penalty": 1.1},
        {"min_new_tokens": 5, "end_ids": frozenset({1, 5, 6})},
        {"input_logprobs_from": 0},
    ]
    texts = ["abc", "hello there", "abc", "a much longer prompt than the others are", "xy", "hello there"]
    return [
        make_request(char_ids(text), rid=str(i), seed=i, **fields)
        for i, (text, fields) in enumerate(zip(texts, some, strict=True))
    ]


def generate(scheduler: Scheduler, weights: dict[str, torch.Tensor]) -> list[Request]:
    """Some steps, a retraction and new weights in the middle, then to the end."""
    batch = requests()
    scheduler.add(batch)
    for _ in range(4):
        scheduler.step()
    scheduler.pause(PauseMode.RETRACT)
    scheduler.publish(weights, "2")
    scheduler.resume()
    run_until_done(scheduler)
    return batch


def test_everything_a_step_uses_is_on_the_model_s_device(model_dir: Path) -> None:
    scheduler = open_scheduler(model_dir, CPU)
    weights = random_weights(scheduler.model.module, 3)
    expected = generate(scheduler, weights)

    with pretend_gpu():
        scheduler = open_scheduler(model_dir, torch.device("cuda"))
        assert {weight.device for weight in named_weights(scheduler.model.module).values()} == {CUDA}
        found = generate(scheduler, {name: weight.to("cuda") for name, weight in weights.items()})
    for left, right in zip(expected, found, strict=True):
        assert left.output_ids == right.output_ids
        assert left.input_logprobs == right.input_logprobs


class Broadcast:
    """One that is complete when it is asked for the second time."""

    def __init__(self) -> None:
        self.asked = 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def wait(self) -> None:
        """As NCCL's: does not wait for the data."""


class Group:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


NAMES = ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"]


def open_receiver(model_dir: Path, backend: str, group: Group, *, timeout: float = 5) -> WeightReceiver:
    model = load_model(str(model_dir), dtype=torch.float32, device=torch.device("cuda"))
    receiver = WeightReceiver(named_weights(model.module, remove_duplicate=False), timeout=timeout)
    receiver._groups["g"], receiver._backends["g"] = group, backend  # type: ignore[assignment]
    return receiver


def receive(receiver: WeightReceiver) -> None:
    specs = [TensorSpec(name, torch.bfloat16, receiver._shapes[name]) for name in NAMES]
    receiver.receive(specs, group_name="g", load_format="flattened_bucket", version="1")


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_received_weights_are_staged_on_the_model_s_device(
    backend: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL receives there, gloo (one GPU for trainer and engine) into host memory, from where they are copied."""
    received: list[tuple[torch.device, Broadcast]] = []

    def broadcast(memory: torch.Tensor, **_: Any) -> Broadcast:
        received.append((memory.device, Broadcast()))
        memory[: 2 * sum(receiver._shapes[name].numel() for name in NAMES)] = 1
        return received[-1][1]

    monkeypatch.setattr("torch.distributed.broadcast", broadcast)
    with pretend_gpu():
        receiver = open_receiver(model_dir, backend, Group())
        receiver._shapes = {name: torch.Size(shape) for name, shape in receiver._shapes.items()}
        receiver.begin("all")
        receive(receiver)
        staged = receiver.end()
        assert {tensor.device for tensor in staged.tensors.values()} == {CUDA}
        assert {tensor.dtype for tensor in staged.tensors.values()} == {torch.float32}
    ((device, work),) = received
    assert device == (CUDA if backend == "nccl" else CPU)
    assert work.asked == (2 if backend == "nccl" else 0), "NCCL's data is there only when the device says so"


def test_a_broadcast_of_nccl_that_never_ends_is_refused_and_its_group_can_be_left(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = Broadcast()
    monkeypatch.setattr(never, "is_completed", lambda: False)
    monkeypatch.setattr("torch.distributed.broadcast", lambda memory, **_: never)
    monkeypatch.setattr("miles.utils.process_group.destroy_process_group", lambda group: None)
    group = Group()
    with pretend_gpu():
        receiver = open_receiver(model_dir, "nccl", group, timeout=0.05)
        receiver.begin("all")
        with pytest.raises(ControlError, match=r"nothing arrived within 0\.05 s.*the old weights stay"):
            receive(receiver)
        receiver.destroy_group("g")
    assert group.aborted, "destroying alone would wait for the broadcast"
