"""Where the trainer's tensors are on a GPU: whole steps on a device that exists in name only.

megatron-core and PyTorch are the real ones; what they compute, they compute on the CPU. So the numbers must be those of
a run without the pretence, to the last bit.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from miles.backends.megatron_utils.cpu_shim import _CREATION_FUNCTIONS
from tests.fast.backends.megatron_utils.conftest import free_port
from tests.fast.backends.megatron_utils.tiny_models import make_args, make_shard
from tests.fast.pretend_gpu import DEVICE, pretend_gpu

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator
    from pathlib import Path

    from miles.backends.megatron_utils.trainer import MegatronTrainer

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU shim, which this builds on, is not for GPUs"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of torch.distributed, at megatron-core's calls
]
DENSE = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "num_steps_per_rollout": 2}
OFFLOADED = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, "use_distributed_optimizer": True}


@contextmanager
def pretend_trainer_gpu() -> Iterator[None]:
    """Takes back what the CPU shim answers to megatron-core, and answers as a GPU would."""
    from megatron.core.optimizer import optimizer_config

    seen_by_megatron: Any = optimizer_config.torch  # type: ignore[attr-defined]
    assert seen_by_megatron is not torch, "the shim is installed"
    patches = [
        *(mock.patch.object(seen_by_megatron, name, getattr(torch, name)) for name in _CREATION_FUNCTIONS),
        mock.patch.object(seen_by_megatron.cuda, "current_device", lambda: DEVICE),
        mock.patch.object(torch.Tensor, "cuda", torch._C.TensorBase.cuda),
        mock.patch.object(torch.Tensor, "type", torch._C.TensorBase.type),
        mock.patch.object(torch.nn.Module, "cuda", torch.nn.Module.cuda.__wrapped__),  # type: ignore[attr-defined]
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "synchronize", lambda device=None: None),
        mock.patch.object(torch.cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state()),
        mock.patch.object(torch.cuda, "set_rng_state", lambda state, device="cuda": torch.set_rng_state(state)),
        # Offloading is written for machines that have Transformer Engine.
        mock.patch.object(optimizer_config, "is_te_min_version", lambda *args, **kwargs: True),
        mock.patch("miles.backends.megatron_utils.optimizer.transformer_engine_installed", lambda: True),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(pretend_gpu())
        yield


@contextmanager
def open_trainer(args: Namespace) -> Iterator[MegatronTrainer]:
    """In a group that is there already: on GPUs it would be one of NCCL."""
    from miles.backends.megatron_utils.trainer import MegatronTrainer

    port = free_port()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    trainer = MegatronTrainer(args, rank=0, world_size=1, master_addr="127.0.0.1", master_port=port)
    try:
        yield trainer
    finally:
        trainer.close()


def learn(trainer: MegatronTrainer, first: int, last: int) -> list[dict[str, float]]:
    """The metrics of these rollouts, without times."""
    found = [trainer.train(i, make_shard(seed=i)) for i in range(first, last)]
    return [{name: value for name, value in step.items() if not name.startswith("perf/")} for step in found]


@pytest.mark.parametrize(
    ("model", "flags"),
    [("qwen2-tied", DENSE), ("qwen3-moe", {"bf16": True, **OFFLOADED})],
    ids=["dense-with-reference", "experts-offloaded"],
)
def test_a_run_with_a_resume_computes_on_the_gpu_what_a_cpu_computes(
    model: str, flags: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    args = make_args(checkpoints[model], lr=1e-4, data_pad_size_multiplier=1, **flags)
    with open_trainer(args) as trainer:
        expected = learn(trainer, 0, 4)
        weights = {name: tensor.clone() for name, tensor in trainer.hf_named_tensors()}

    args.save = args.load = str(tmp_path)
    with pretend_trainer_gpu():
        with open_trainer(args) as trainer:
            found = learn(trainer, 0, 2)
            trainer.save(1)
        with open_trainer(args) as trainer:
            assert trainer.load() == 2
            found += learn(trainer, 2, 4)
            assert {p.device for stage in trainer._stages for p in stage.parameters()} == {DEVICE}
            assert offloaded_devices(trainer) == ({torch.device("cpu")} if "optimizer_cpu_offload" in flags else set())
            on_gpu = {name: tensor.cpu() for name, tensor in trainer.hf_named_tensors()}
    assert found == expected
    assert all(torch.equal(on_gpu[name], weights[name]) for name in weights)


def offloaded_devices(trainer: MegatronTrainer) -> set[torch.device]:
    """Where an offloaded optimizer's moments and master weights are."""
    inner = [part.optimizer for part in trainer._optimizer.chained_optimizers]  # type: ignore[attr-defined]
    parts = [optimizer for hybrid in inner for optimizer in getattr(hybrid, "cpu_optimizers", [])]
    states = [state for optimizer in parts for state in optimizer.state.values()]
    return {value.device for state in states for value in state.values() if isinstance(value, torch.Tensor)}


def test_rows_are_padded_where_their_tokens_are(checkpoints: dict[str, Path]) -> None:
    """To a multiple of 128 by default on a GPU; the padding is no sample, so the numbers stay the same."""
    args = make_args(checkpoints["qwen3-tied"], micro_batch_size=3)
    with open_trainer(args) as trainer:
        expected = learn(trainer, 0, 1)
    with pretend_trainer_gpu(), open_trainer(args) as trainer:
        found = learn(trainer, 0, 1)
    assert found[0] == pytest.approx(expected[0], rel=1e-4)


def test_an_offloaded_optimizer_s_state_is_restored_without_a_detour_over_the_gpu(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is several times what fits there."""
    from miles.backends.megatron_utils import optimizer_state

    args = make_args(checkpoints["qwen3-tied"], bf16=True, save=str(tmp_path), load=str(tmp_path), **OFFLOADED)
    restored: list[torch.device] = []
    restore = optimizer_state.OptimizedParam.restore

    def watched(self: Any, *arguments: Any) -> None:
        restore(self, *arguments)
        entry = self.optimizer.state.get(self.optimized, {})
        restored.extend(value.device for value in entry.values() if isinstance(value, torch.Tensor))

    monkeypatch.setattr(optimizer_state.OptimizedParam, "restore", watched)
    with pretend_trainer_gpu(), open_trainer(args) as trainer:
        learn(trainer, 0, 1)
        trainer.save(0)
        trainer.load()
    assert set(restored) == {torch.device("cpu")}


def test_times_are_those_of_the_gpu_s_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase that only hands its work over takes no time itself, and the next one would seem to take it all."""
    from miles.backends.megatron_utils.metrics import Times

    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(f"wait for {device}"))
    times = Times(torch.device("cuda"))
    with times.measure("log_probs"):
        events.append("work")
    assert events == ["wait for cuda", "work", "wait for cuda"]
    assert set(times.seconds) == {"log_probs"}


@pytest.mark.parametrize(
    ("variable", "offload", "threads"),
    [("1", True, 2), (None, True, 2), ("6", True, None), ("1", False, None)],
)
def test_an_optimizer_in_host_memory_gets_a_share_of_the_cores(
    variable: str | None, offload: bool, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sets OMP_NUM_THREADS to 1 for its workers; more than that is the user's."""
    from argparse import Namespace

    from miles.backends.megatron_utils import trainer

    chosen: list[int] = []
    monkeypatch.setattr(trainer.torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(trainer.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(trainer.os, "sched_getaffinity", lambda pid: range(17))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    trainer._set_threads(Namespace(optimizer_cpu_offload=offload, actor_num_gpus_per_node=6))
    assert chosen == ([threads] if threads else [])


def test_a_transformer_engine_that_megatron_core_cannot_use_is_told() -> None:
    """Without one megatron-core has stand-ins for its layers, which is also what it has for one that does not fit."""
    from miles.backends.megatron_utils.model import require_working_transformer_engine

    with pytest.raises(ValueError, match=r"this megatron-core cannot use it: No module named 'transformer_engine'"):
        require_working_transformer_engine()


def test_master_weights_are_kept_whole() -> None:
    """Fused Adam can keep the 16 bits that a bf16 weight lacks instead; a checkpoint would have them as numbers."""
    from argparse import Namespace

    from miles.backends.megatron_utils import optimizer

    args = Namespace(use_precision_aware_optimizer=True)
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        with pytest.raises(ValueError, match="need the package transformer_engine"):
            optimizer._memory_options(args)
        with mock.patch.object(optimizer, "transformer_engine_installed", lambda: True):
            assert optimizer._memory_options(args)["store_param_remainders"] is False


def test_a_pytorch_without_cuda_is_told_where_the_machine_has_a_gpu(checkpoints: dict[str, Path]) -> None:
    """It would train on the CPU, and meet the engines in a group that theirs is not."""
    from miles.backends.megatron_utils.trainer import MegatronTrainer

    args = make_args(checkpoints["qwen3-tied"], distributed_backend="nccl")
    with pytest.raises(ValueError, match="sees no CUDA device, and the driver found one"):
        MegatronTrainer(args, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port())
