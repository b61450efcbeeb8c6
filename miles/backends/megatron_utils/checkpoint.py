"""The trainer's part of a checkpoint set: bytes and numbers, never code: safetensors and JSON, nothing is unpickled.

    iter_0000042/
      config.json, tokenizer,           the model under Hugging Face names: transformers, the engines and
        model.safetensors               `--hf-checkpoint` can load the directory as it is
      optimizer.safetensors             "<hf name>|exp_avg", ...: moments under Hugging Face names, and float32
                                        master weights where the model is bf16
      rng.safetensors                   generator states of each rank
      rollout/state.json                the rollout side's part, taken from where it was staged
      state.json                        rollout id, weight version, position in the schedule, scalar optimizer state,
                                        lineage; size and digest of every other file

Rank 0 writes the set, and publishes it: `miles.utils.checkpoint_set` says how sets are named, chosen and checked.

Why an own format: megatron-core's distributed checkpoints keep metadata and common state as pickles. Tensors under
Hugging Face names do not depend on how the model was split, because the converter that splits weights also splits
moments.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors.torch import load_file

from miles.backends.megatron_utils import parallel
from miles.backends.megatron_utils.gather import GatherPlan, collect, gathered_weights
from miles.backends.megatron_utils.hf_export import publish, write_hf_files
from miles.backends.megatron_utils.optimizer_state import OptimizerState, Scalars
from miles.backends.megatron_utils.safetensors_io import write_file
from miles.backends.megatron_utils.weights import load_hf_weights
from miles.utils import checkpoint_set
from miles.utils.checkpoint_set import POINTER, verify

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from miles.backends.megatron_utils.hf_config import HFModelConfig

__all__ = ["POINTER", "Leg", "Progress", "TrainingState", "hf_directory", "load", "load_newest", "save", "verify"]

logger = logging.getLogger(__name__)

_OPTIMIZER = "optimizer.safetensors"
_RNG = "rng.safetensors"
_BUCKET_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class Leg:
    """The rollouts `first` to `last` that one run has trained on."""

    run: str
    first: int
    last: int


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    rollout_id: int
    """The last rollout that was trained on."""
    weight_version: int
    lineage: tuple[Leg, ...] = ()
    """The runs whose steps these weights are made of, one after the other."""


@dataclass(frozen=True)
class TrainingState:
    """The objects that a checkpoint is made from and loaded into."""

    stages: Sequence[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    plan: GatherPlan


def save(
    directory: str | Path,
    state: TrainingState,
    progress: Progress,
    *,
    hf: HFModelConfig,
    args: Namespace,
    rollout_state: str | Path | None = None,
) -> str:
    """Write the set `iter_<rollout_id>` under `directory`; rank 0 writes, the others wait. Returns its path.

    `rollout_state`: the staged file that becomes the rollout side's part.
    """
    target = checkpoint_set.set_path(directory, progress.rollout_id)
    rng = _gather_rng_states()
    contents = _Contents(state, hf, with_optimizer=not getattr(args, "no_save_optim", False))
    try:
        if dist.get_rank() == 0:
            checkpoint_set.remove_abandoned_parts(directory)
            with publish(target) as part:
                if rollout_state is not None:
                    checkpoint_set.take_rollout_part(rollout_state, part)
                _write(part, contents, progress, rng, state=state, args=args)
            checkpoint_set.write_pointer(directory, progress.rollout_id)
    finally:
        contents.drain()  # the other ranks send their shards, also where rank 0 has failed
        parallel.barrier()
    return str(target)


def load_newest(directory: str | Path, state: TrainingState, *, hf: HFModelConfig, args: Namespace) -> Progress | None:
    """Load the newest readable set under `directory` into `state`; None where there is no set at all.

    Where `directory` is a Hugging Face checkpoint instead, its weights are loaded, and None is returned as well.

    Raises:
        ValueError: there are sets, but none is readable.
    """
    root = Path(directory)
    newest = checkpoint_set.newest_readable(root)
    if newest is not None:
        return load(newest, state, hf=hf, args=args)
    if (root / "config.json").is_file():
        load_hf_weights(state.stages, root, hf)
        state.optimizer.reload_model_params()
        logger.info("--load %s: starting from these weights", directory)
    else:
        logger.info("--load %s has no checkpoint: starting from %s", directory, args.hf_checkpoint)
    return None


def hf_directory(path: str | Path) -> Path:
    """`path` where it is a Hugging Face checkpoint, or the newest readable one of ours under it.

    Raises:
        ValueError: neither.
    """
    root = Path(path)
    if (root / "config.json").is_file():
        return root
    found = next((c for c in checkpoint_set.candidates(root) if verify(c) is None), None)
    if found is None:
        raise ValueError(f"{path} has no config.json, and no readable checkpoint (iter_*) either")
    return found


class _Contents:
    """The tensors of a set, gathered to rank 0 bucket by bucket; the other ranks take part by draining it."""

    def __init__(self, state: TrainingState, hf: HFModelConfig, *, with_optimizer: bool) -> None:
        self.weights = self._weights(state, hf)
        optimizer = OptimizerState(state.optimizer, state.stages, hf)
        fields = optimizer.fields() if with_optimizer else {}
        self.scalars = optimizer.scalars() if with_optimizer else {}
        self.has_optimizer = with_optimizer
        self.optimizer = self._optimizer(state, optimizer, hf, fields)

    def _weights(self, state: TrainingState, hf: HFModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in gathered_weights(state.plan, state.stages, hf, _BUCKET_BYTES):
            yield from bucket

    def _optimizer(
        self, state: TrainingState, optimizer: OptimizerState, hf: HFModelConfig, fields: dict[str, set[str]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for field, parameters in fields.items():
            for bucket in state.plan.only(parameters).buckets(_BUCKET_BYTES, torch.float32):
                wholes = optimizer.wholes(bucket, field)
                for name, tensor in collect(bucket, wholes, hf, dtype=torch.float32):
                    yield f"{name}|{field}", tensor

    def drain(self) -> None:
        """Gather what is left; in the order in which it is written."""
        for tensors in (self.weights, self.optimizer):
            for _ in tensors:
                pass


def _write(
    part: Path,
    contents: _Contents,
    progress: Progress,
    rng: dict[str, torch.Tensor],
    *,
    state: TrainingState,
    args: Namespace,
) -> None:
    write_hf_files(part, contents.weights, source=Path(args.hf_checkpoint))
    write_file(rng, part / _RNG)
    if contents.has_optimizer:
        write_file({name: tensor.cpu().contiguous() for name, tensor in contents.optimizer}, part / _OPTIMIZER)
    record = {
        "rollout_id": progress.rollout_id,
        "weight_version": progress.weight_version,
        "lineage": [asdict(leg) for leg in progress.lineage],
        "optimizer_steps": state.scheduler.num_steps,
        "optimizer_scalars": contents.scalars,
        "optimizer_group_steps": [_step_of(group) for group in state.optimizer.param_groups],
    }
    checkpoint_set.write_record(part, record)


def load(checkpoint: Path, state: TrainingState, *, hf: HFModelConfig, args: Namespace) -> Progress:
    """Load this set, which `checkpoint_set.verify` has found whole, into `state`."""
    record = checkpoint_set.read_record(checkpoint)
    load_hf_weights(state.stages, checkpoint, hf)
    state.optimizer.reload_model_params()
    if (checkpoint / _OPTIMIZER).is_file() and not getattr(args, "reset_optimizer_states", False):
        _load_optimizer(checkpoint, state, record["optimizer_scalars"], hf)
        steps = [step for step in record["optimizer_group_steps"] if step is not None]
        for group in state.optimizer.param_groups if steps else ():
            group["step"] = max(steps)
        state.scheduler.num_steps = int(record["optimizer_steps"])
        state.scheduler.step(0)
    else:
        logger.warning("checkpoint %s: optimizer and schedule start anew", checkpoint)
    _restore_rng_state(load_file(checkpoint / _RNG))
    logger.info("resumed from %s", checkpoint)
    return Progress(
        rollout_id=int(record["rollout_id"]),
        weight_version=int(record["weight_version"]),
        lineage=tuple(Leg(**leg) for leg in record.get("lineage", ())),
    )


def _step_of(group: dict[str, Any]) -> int | None:
    """The step that fused optimizers count per parameter group (PyTorch's count per parameter)."""
    return int(group["step"]) if "step" in group else None


def _load_optimizer(checkpoint: Path, state: TrainingState, scalars: Scalars, hf: HFModelConfig) -> None:
    saved = load_file(checkpoint / _OPTIMIZER)
    fields = sorted({key.rpartition("|")[2] for key in saved})
    OptimizerState(state.optimizer, state.stages, hf).restore(saved.get, fields, scalars)


# --- random generators -----------------------------------------------------------------------------------------------


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state | {f"megatron.{name}": tensor for name, tensor in get_cuda_rng_tracker().get_states().items()}


def _gather_rng_states() -> dict[str, torch.Tensor]:
    """ "<rank>|<generator>" -> state bytes of all ranks."""
    own = {name: tensor.cpu().clone() for name, tensor in _rng_state().items()}
    everyone: list[Any] = [own]
    if dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    return {f"{rank}|{name}": tensor for rank, states in enumerate(everyone) for name, tensor in states.items()}


def _restore_rng_state(saved: dict[str, torch.Tensor]) -> None:
    """Restore this rank's generators; a rank that the checkpoint does not know keeps its fresh ones."""
    prefix = f"{dist.get_rank()}|"
    own = {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
    if not own:
        return
    torch.set_rng_state(own["torch"])
    if torch.cuda.is_available() and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"])
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name.removeprefix("megatron."): t for name, t in own.items() if name.startswith("megatron.")})
