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
from miles.backends.megatron_utils.converter import param_spec, to_hf, to_mcore
from miles.backends.megatron_utils.hf_export import publish, write_hf_files
from miles.backends.megatron_utils.model import unwrap
from miles.backends.megatron_utils.safetensors_io import write_file
from miles.backends.megatron_utils.weights import hf_named_tensors, load_hf_weights
from miles.utils import checkpoint_set
from miles.utils.checkpoint_set import POINTER, verify

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from miles.backends.megatron_utils.hf_config import HFModelConfig

__all__ = ["POINTER", "Leg", "Progress", "TrainingState", "hf_directory", "load", "load_newest", "save", "verify"]

logger = logging.getLogger(__name__)

Scalars = dict[str, dict[str, float]]
"""{field of the torch optimizer's state: {megatron-core name: value}}"""

_OPTIMIZER = "optimizer.safetensors"
_RNG = "rng.safetensors"
_MASTER = "master"


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

    model: torch.nn.Module
    optimizer: Any
    scheduler: Any


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
    if dist.get_rank() == 0:
        checkpoint_set.remove_abandoned_parts(directory)
        with publish(target) as part:
            if rollout_state is not None:
                checkpoint_set.take_rollout_part(rollout_state, part)
            _write(part, state, progress, rng, hf=hf, args=args)
        checkpoint_set.write_pointer(directory, progress.rollout_id)
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
        load_hf_weights(state.model, root, hf)
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


def _write(
    part: Path,
    state: TrainingState,
    progress: Progress,
    rng: dict[str, torch.Tensor],
    *,
    hf: HFModelConfig,
    args: Namespace,
) -> None:
    write_hf_files(part, hf_named_tensors(state.model, hf), source=Path(args.hf_checkpoint))
    write_file(rng, part / _RNG)
    scalars: Scalars = {}
    if not getattr(args, "no_save_optim", False):
        tensors, scalars = _optimizer_tensors(state, hf)
        write_file(tensors, part / _OPTIMIZER)
    record = {
        "rollout_id": progress.rollout_id,
        "weight_version": progress.weight_version,
        "lineage": [asdict(leg) for leg in progress.lineage],
        "optimizer_steps": state.scheduler.num_steps,
        "optimizer_scalars": scalars,
        "optimizer_group_steps": [_step_of(group) for group in state.optimizer.param_groups],
    }
    checkpoint_set.write_record(part, record)


def load(checkpoint: Path, state: TrainingState, *, hf: HFModelConfig, args: Namespace) -> Progress:
    """Load this set, which `checkpoint_set.verify` has found whole, into `state`."""
    record = checkpoint_set.read_record(checkpoint)
    load_hf_weights(state.model, checkpoint, hf)
    state.optimizer.reload_model_params()
    if (checkpoint / _OPTIMIZER).is_file() and not getattr(args, "reset_optimizer_states", False):
        _load_optimizer(checkpoint, state, record["optimizer_scalars"], hf)
        for group, step in zip(state.optimizer.param_groups, record["optimizer_group_steps"], strict=True):
            if step is not None:
                group["step"] = step
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


# --- optimizer state, under Hugging Face names -----------------------------------------------------------------------


def _optimized(state: TrainingState) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
    """megatron-core name, the model's parameter, and the tensor that the optimizer updates: the parameter itself, or
    its float32 master copy."""
    for name, parameter in unwrap(state.model).named_parameters():
        yield name, parameter, getattr(parameter, "main_param", parameter)


def _torch_optimizer(state: TrainingState) -> torch.optim.Optimizer:
    inner: torch.optim.Optimizer = state.optimizer.optimizer
    return inner


def _optimizer_tensors(state: TrainingState, hf: HFModelConfig) -> tuple[dict[str, torch.Tensor], Scalars]:
    """Tensors "<hf name>|<field>", and the scalars, of the torch optimizer's state."""
    tensors: dict[str, torch.Tensor] = {}
    scalars: Scalars = {}
    optimizer = _torch_optimizer(state)
    for name, parameter, optimized in _optimized(state):
        fields = dict(optimizer.state.get(optimized, {}))
        if optimized is not parameter:
            fields[_MASTER] = optimized.detach()
        for field, value in fields.items():
            if isinstance(value, torch.Tensor) and value.shape == optimized.shape:
                spec = param_spec(name)
                for hf_name, part in zip(spec.hf_names, to_hf(spec, value, hf), strict=True):
                    tensors[f"{hf_name}|{field}"] = part.cpu().contiguous()
            else:
                scalars.setdefault(field, {})[name] = float(value)
    return tensors, scalars


def _step_of(group: dict[str, Any]) -> int | None:
    """The step that fused optimizers count per parameter group (PyTorch's count per parameter)."""
    return int(group["step"]) if "step" in group else None


@torch.no_grad()
def _load_optimizer(checkpoint: Path, state: TrainingState, scalars: Scalars, hf: HFModelConfig) -> None:
    """Fill the torch optimizer's state. Every parameter gets its own `step` tensor: a shared one would be incremented
    once per parameter and step, and the training would silently diverge."""
    saved = load_file(checkpoint / _OPTIMIZER)
    fields = sorted({key.rpartition("|")[2] for key in saved})
    optimizer = _torch_optimizer(state)
    optimizer.state.clear()
    for name, _, optimized in _optimized(state):
        spec = param_spec(name)
        entry: dict[str, Any] = {
            field: torch.tensor(values[name]) for field, values in scalars.items() if name in values
        }
        for field in fields:
            parts = [saved.get(f"{hf_name}|{field}") for hf_name in spec.hf_names]
            if any(part is None for part in parts):
                continue
            merged = to_mcore(spec, [part for part in parts if part is not None], hf).to(optimized.device)
            if field == _MASTER:
                optimized.copy_(merged)
            else:
                entry[field] = merged.clone()
        if entry:
            optimizer.state[optimized] = entry


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
