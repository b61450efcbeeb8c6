"""The trainer's part of a checkpoint set: bytes and numbers, never code: safetensors and JSON, nothing is unpickled.

    iter_0000042/
      config.json, tokenizer,           the model under Hugging Face names: transformers, the engines and
        model*.safetensors, index       `--hf-checkpoint` can load the directory as it is
      optimizer*.safetensors            "<hf name>|exp_avg", ...: moments under Hugging Face names, and float32
                                        master weights where the model is bf16
      rng.safetensors                   generator states of each rank
      rollout/state.json                the rollout side's part, taken from where it was staged
      state.json                        rollout id, weight version, position in the schedule, scalar optimizer state,
                                        lineage; size and digest of every other file

The ranks write side by side: each parameter is gathered to the first rank that has a shard of it (one rank of each
pipeline stage, of each expert-parallel rank for experts). Rank 0 publishes the set: `miles.utils.checkpoint_set` says
how sets are named, chosen and checked.

Why an own format: megatron-core's distributed checkpoints keep metadata and common state as pickles. Whole tensors
under Hugging Face names do not depend on how the model was split, because the converter that splits weights also splits
moments: a set is loaded into any layout, with or without the distributed optimizer.
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

from miles.backends.megatron_utils.checkpoint_files import assemble, optimizer_files, take_manifests, write_part
from miles.backends.megatron_utils.gathered_state import GatheredState
from miles.backends.megatron_utils.hf_export import copy_model_files
from miles.backends.megatron_utils.optimizer_state import OptimizerState, Scalars
from miles.backends.megatron_utils.safetensors_io import SafetensorsReader, write_file
from miles.backends.megatron_utils.saving import Saving
from miles.backends.megatron_utils.weights import load_hf_weights
from miles.utils import checkpoint_set
from miles.utils.checkpoint_set import POINTER, verify

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from miles.backends.megatron_utils.gather import GatherPlan
    from miles.backends.megatron_utils.hf_config import HFModelConfig

__all__ = ["POINTER", "Leg", "Progress", "TrainingState", "hf_directory", "load", "load_newest", "save", "verify"]

logger = logging.getLogger(__name__)

_RNG = "rng.safetensors"
_KINDS = {"exp_avg": "adam", "momentum_buffer": "sgd"}
"""A field of the state that tells which --optimizer has made it."""


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
) -> Saving:
    """Write the set `iter_<rollout_id>` under `directory`; a collective. Finish what it returns before the next one.

    With `--async-save` only copying the state to the CPU is waited for: the set is written beside the training.
    `rollout_state`: the staged file that becomes the rollout side's part.
    """
    in_background = bool(getattr(args, "async_save", False))
    saving = Saving(checkpoint_set.set_path(directory, progress.rollout_id), rollout_state)
    contents = GatheredState(state, hf, with_optimizer=not getattr(args, "no_save_optim", False))
    record = _record(progress, state, contents.scalars)
    rng = _gather_rng_states()
    stream = contents.stream()
    own = [(kind, name, tensor.to("cpu", copy=True)) for kind, name, tensor in stream] if in_background else stream
    timeout = 60.0 * (getattr(args, "distributed_timeout_minutes", None) or 10)

    def write(part: Path) -> None:
        try:
            if dist.get_rank() in state.plan.writers:
                write_part(part, dist.get_rank(), own)
        finally:
            for _ in own:  # what the others write, and the rest of this rank's where it could not write it
                pass

    def complete(part: Path) -> None:
        known = assemble(part, take_manifests(part, state.plan.writers, timeout_secs=timeout))
        kinds = {param.dtype for param in state.plan.params}
        copy_model_files(Path(args.hf_checkpoint), part, dtypes=kinds)
        write_file(rng, part / _RNG)
        checkpoint_set.write_record(part, record, known)

    saving.start(write, complete, in_background=in_background)
    return saving


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


def _record(progress: Progress, state: TrainingState, scalars: Scalars) -> dict[str, Any]:
    return {
        "rollout_id": progress.rollout_id,
        "weight_version": progress.weight_version,
        "lineage": [asdict(leg) for leg in progress.lineage],
        "optimizer_steps": state.scheduler.num_steps,
        "optimizer_scalars": scalars,
        "optimizer_group_steps": [_step_of(group) for group in state.optimizer.param_groups],
        "trainer_ranks": dist.get_world_size(),
    }


def load(checkpoint: Path, state: TrainingState, *, hf: HFModelConfig, args: Namespace) -> Progress:
    """Load this set, which `checkpoint_set.verify` has found whole, into `state`.

    Raises ValueError where it has the state of another kind of optimizer.
    """
    record = checkpoint_set.read_record(checkpoint)
    load_hf_weights(state.stages, checkpoint, hf)
    state.optimizer.reload_model_params()
    if optimizer_files(checkpoint) and not getattr(args, "reset_optimizer_states", False):
        _load_optimizer(checkpoint, state, record["optimizer_scalars"], hf, kind=getattr(args, "optimizer", "adam"))
        steps = [step for step in record["optimizer_group_steps"] if step is not None]
        for group in state.optimizer.param_groups if steps else ():
            group["step"] = max(steps)
        state.scheduler.num_steps = int(record["optimizer_steps"])
        state.scheduler.step(0)
    else:
        logger.warning("checkpoint %s: optimizer and schedule start anew", checkpoint)
    _restore_rng_state(load_file(checkpoint / _RNG), ranks=record.get("trainer_ranks"))
    logger.info("resumed from %s", checkpoint)
    return Progress(
        rollout_id=int(record["rollout_id"]),
        weight_version=int(record["weight_version"]),
        lineage=tuple(Leg(**leg) for leg in record.get("lineage", ())),
    )


def _step_of(group: dict[str, Any]) -> int | None:
    """The step that fused optimizers count per parameter group (PyTorch's count per parameter)."""
    return int(group["step"]) if "step" in group else None


def _load_optimizer(checkpoint: Path, state: TrainingState, scalars: Scalars, hf: HFModelConfig, *, kind: str) -> None:
    with SafetensorsReader(checkpoint, optimizer_files(checkpoint)) as reader:
        fields = sorted({key.rpartition("|")[2] for key in reader.names})
        # Neither is there where no step was made yet.
        saved = next((known for field, known in _KINDS.items() if field in fields), kind)
        if saved != kind:
            raise ValueError(
                f"--load: {checkpoint} has the state of --optimizer {saved}, and this run has --optimizer {kind}. "
                f"Instead: --optimizer {saved}, or --reset-optimizer-states to start optimizer and schedule anew"
            )
        OptimizerState(state.optimizer, state.stages, hf).restore(reader.get, fields, scalars)


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


def _restore_rng_state(saved: dict[str, torch.Tensor], *, ranks: int | None) -> None:
    """Restore this rank's generators; with another number of ranks than the checkpoint's all keep their fresh ones."""
    if ranks not in (None, dist.get_world_size()):
        return
    prefix = f"{dist.get_rank()}|"
    own = {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
    if not own:
        return
    torch.set_rng_state(own["torch"])
    if torch.cuda.is_available() and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"])
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name.removeprefix("megatron."): t for name, t in own.items() if name.startswith("megatron.")})
