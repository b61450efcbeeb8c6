"""One trainer rank: holds the model, learns from rollouts, keeps checkpoints, feeds the engines.

    train(rollout_id, shard):
        shard --tensors--> batch --reference and old log-probabilities--> --advantages--> batch
        for each optimizer step of the rollout:
            micro-batches -> forward, loss, backward ... -> reduced gradients -> clip -> AdamW -> schedule
        -> metrics, summed over data-parallel ranks

Every rank calls every method in the same order: `train`, `save`, `load` and `export_hf` contain collectives.
There is no thread here and no Ray; the methods block.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from miles.backends.megatron_utils.cpu_shim import install_cpu_shim
from miles.backends.megatron_utils.hf_config import HFModelConfig

if not torch.cuda.is_available():  # before anything of megatron-core is imported: it asks for a device right there
    install_cpu_shim()

from miles.backends.megatron_utils import checkpoint, metrics, parallel
from miles.backends.megatron_utils.gather import GatherPlan, gathered_weights
from miles.backends.megatron_utils.hf_export import export_hf_checkpoint
from miles.backends.megatron_utils.layout import ParallelLayout, layers_from
from miles.backends.megatron_utils.lockstep import in_lockstep
from miles.backends.megatron_utils.model import build_model, use_transformer_engine
from miles.backends.megatron_utils.moe_losses import forget_moe_losses, take_moe_losses
from miles.backends.megatron_utils.optimizer import (
    build_optimizer,
    build_scheduler,
    checks_for_nan,
    optimizer_step,
    steps_per_rollout,
    wrap_data_parallel,
)
from miles.backends.megatron_utils.passes import StepScale, log_prob_pass, training_pass
from miles.backends.megatron_utils.train_data import batch_from_shard, micro_batch, pad_multiple
from miles.backends.megatron_utils.updaters import Updater, make_updater
from miles.backends.megatron_utils.weight_update import WeightUpdateConfig, compare_checksums
from miles.backends.megatron_utils.weights import load_hf_weights
from miles.backends.training_utils.advantages import compute_advantages_and_returns
from miles.backends.training_utils.batching import micro_batch_indices, optimizer_steps
from miles.backends.training_utils.loss import LossConfig
from miles.utils.checksum import tensor_checksum
from miles.utils.misc import load_function

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from miles.backends.megatron_utils.saving import Saving
    from miles.backends.megatron_utils.train_data import MicroBatch
    from miles.backends.megatron_utils.wire import Piece

logger = logging.getLogger(__name__)


class MegatronTrainer:
    """See the module docstring. `weight_version` counts weight updates; 0 before the first."""

    def __init__(self, args: Namespace, *, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        """Join the other ranks and build model, optimizer and schedule with the weights of `--hf-checkpoint`.

        Raises:
            ValueError: a checkpoint or flag that cannot be used; the message names it.
        """
        _set_threads(args)
        self._args = args
        self._layout = ParallelLayout.from_args(args, world_size)
        self._hf = HFModelConfig.from_dir(args.hf_checkpoint)
        self._layout.check_model(self._hf, **layers_from(args))
        self._loss_config = LossConfig.from_args(args)
        self._hooks = _Hooks.from_args(args)
        self._update_config = WeightUpdateConfig.from_args(args)
        parallel.initialize_distributed(
            args, self._layout, rank=rank, world_size=world_size, master_addr=master_addr, master_port=master_port
        )
        self.dp_rank = parallel.data_parallel_rank()
        self.dp_size = self._layout.data_size(world_size)
        self.is_weight_source = rank == 0
        self.weight_version = 0
        self._lineage: tuple[checkpoint.Leg, ...] = ()
        self._first_trained: int | None = None
        self._unfinished: tuple[int, Saving] | None = None
        self._device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self._updater: Updater | None = None
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        """Models, optimizer and schedule."""
        self._hooks.init(self._args)
        stages = build_model(self._hf, self._args, self._layout)
        load_hf_weights(stages, self._args.hf_checkpoint, self._hf)
        self._stages = wrap_data_parallel(stages, self._args)
        self._plan = GatherPlan.make(self._stages, self._hf)
        self._optimizer = build_optimizer(self._stages, self._args)
        self._scheduler = build_scheduler(self._optimizer, self._args)
        self._reference = self._build_reference()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def load(self, checkpoint_dir: str | None = None) -> int:
        """Resume from this set, which is known to be whole, or else from the newest readable one under `--load`;
        returns the rollout to go on with (0: afresh).

        Raises:
            ValueError: there are checkpoints, but none can be read.
        """
        state, hf, args = self._training_state(), self._hf, self._args
        directory = getattr(args, "load", None)
        progress: checkpoint.Progress | None = None
        if checkpoint_dir is not None:
            progress = checkpoint.load(Path(checkpoint_dir), state, hf=hf, args=args)
        elif directory:
            progress = checkpoint.load_newest(directory, state, hf=hf, args=args)
        if progress is None:
            return 0
        self.weight_version, self._lineage = progress.weight_version, progress.lineage
        return progress.rollout_id + 1

    def save(self, rollout_id: int, rollout_state: str | None = None) -> str:
        """Write a checkpoint set that continues after `rollout_id` under `--save`; returns its directory.

        It appears complete or not at all: written beside, then renamed, then pointed to; with `--async-save` some time
        after this has returned (`finish_saving` waits for it). `rollout_state` is the staged file that becomes the
        rollout side's part of the set.
        """
        directory = getattr(self._args, "save", None)
        if not directory:
            raise ValueError("--save must name a directory to write checkpoints")
        self.finish_saving()
        own_leg = checkpoint.Leg(
            run=Path(getattr(self._args, "run_dir", None) or "").name,
            first=rollout_id if self._first_trained is None else self._first_trained,
            last=rollout_id,
        )
        saving = checkpoint.save(
            directory,
            self._training_state(),
            checkpoint.Progress(rollout_id, self.weight_version, (*self._lineage, own_leg)),
            hf=self._hf,
            args=self._args,
            rollout_state=rollout_state,
        )
        self._unfinished = (rollout_id, saving)
        if not getattr(self._args, "async_save", False):
            self.finish_saving()
        return str(saving.path)

    def finish_saving(self) -> None:
        """Wait for the set that is being written, if there is one; raises what went wrong with it."""
        if self._unfinished is None:
            return
        (rollout_id, saving), self._unfinished = self._unfinished, None
        saving.finish()
        if self.is_weight_source:
            self._hooks.post_save(self._args, rollout_id, str(saving.path))

    def export_hf(self, directory: str) -> None:
        """Write config, tokenizer and weights so that `from_pretrained(directory)` loads them."""
        tensors = self.hf_named_tensors()
        try:
            if self.is_weight_source:
                export_hf_checkpoint(directory, tensors, source=self._args.hf_checkpoint)
        finally:
            for _ in tensors:  # the other ranks send their shards, also where rank 0 found the disk full
                pass
            parallel.barrier()

    def _training_state(self) -> checkpoint.TrainingState:
        return checkpoint.TrainingState(self._stages, self._optimizer, self._scheduler, self._plan)

    # --- training ----------------------------------------------------------------------------------------------------

    def train(self, rollout_id: int, shard: dict[str, Any]) -> dict[str, float]:
        """All optimizer steps of one rollout on this rank's shard; returns the metrics, equal on every rank.

        Raises:
            ValueError: the shard lacks what the flags call for, or does not divide into optimizer steps.
            FloatingPointError: a NaN or infinite gradient norm, unless such steps are skipped by flag.
        """
        start = time.perf_counter()
        batch = batch_from_shard(shard, self._device)
        num_samples = len(batch["tokens"])
        global_batch_size = self._global_batch_size(shard, num_samples)
        steps = optimizer_steps(num_samples, global_batch_size, self.dp_size)
        reuse_forward = self._can_reuse_forward(len(steps))
        times = metrics.Times(self._device)
        if self._reference is not None:
            with times.measure("ref_log_probs"):
                batch["ref_log_probs"] = self._log_probs(self._reference, batch)
        if not reuse_forward and self._needs_own_log_probs():
            self._hooks.before_log_prob(self._args, self._stages)
            with times.measure("log_probs"):
                batch["log_probs"] = self._log_probs(self._stages, batch)
        if getattr(self._args, "compute_advantages_and_returns", True) and self._loss_config.loss_type != "sft_loss":
            compute_advantages_and_returns(self._args, batch, all_reduce_sum=parallel.sum_over_data_parallel)
        with times.measure("actor_train"):
            step_metrics = [
                self._step(rollout_id, i, batch, samples, global_batch_size, reuse_forward)
                for i, samples in enumerate(steps)
            ]
        if self._first_trained is None:
            self._first_trained = rollout_id
        tokens = float(sum(batch["total_lengths"]))
        return {
            **metrics.mean_of_steps(step_metrics),
            **metrics.rollout_means(batch),
            **metrics.perf(times, tokens=tokens, dp_size=self.dp_size, total_seconds=time.perf_counter() - start),
            "train/step": float(self._scheduler.num_steps),
        }

    def _global_batch_size(self, shard: dict[str, Any], num_samples: int) -> int:
        """Samples of one optimizer step over all ranks: as the shard says, or the flags, or an even share."""
        return int(
            shard.get("global_batch_size")
            or getattr(self._args, "global_batch_size", None)
            or num_samples * self.dp_size // steps_per_rollout(self._args)
        )

    def _can_reuse_forward(self, num_steps: int) -> bool:
        """With one optimizer step, the weights before the step are those of its own forward pass: the pass that would
        recompute the old log-probabilities is left out, and the numbers are the same (without dropout)."""
        return (
            num_steps == 1
            and self._loss_config.loss_type == "policy_loss"
            and not self._loss_config.use_rollout_logprobs
            and not getattr(self._args, "kl_coef", None)
            and not getattr(self._args, "use_opd", False)
            and not self._hooks.wants_log_prob_pass
            and not getattr(self._args, "hidden_dropout", 0.0)
            and not getattr(self._args, "attention_dropout", 0.0)
        )

    def _needs_own_log_probs(self) -> bool:
        config = self._loss_config
        return config.loss_type != "sft_loss" and (not config.use_rollout_logprobs or config.get_mismatch_metrics)

    def _step(
        self,
        rollout_id: int,
        step_id: int,
        batch: dict[str, Any],
        samples: Sequence[int],
        global_batch_size: int,
        reuse_forward: bool,
    ) -> dict[str, float]:
        """One optimizer step on the samples at these positions of the batch."""
        self._hooks.before_train_step(self._args, rollout_id, step_id, self._stages, self._optimizer, self._scheduler)
        micro_batches, indices = self._micro_batches(batch, samples)
        scale = self._scale(batch, samples, global_batch_size)
        for stage in self._stages:
            stage.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums = training_pass(
            self._stages,
            micro_batches,
            self._loss_config,
            scale,
            vocab_size=self._hf.vocab_size,
            reuse_forward=reuse_forward,
        )
        if reuse_forward:
            batch["log_probs"] = _in_batch_order(indices, [m.samples["log_probs"] for m in micro_batches])
        learning_rates = [group["lr"] for group in self._optimizer.param_groups]
        updated, grad_norm = optimizer_step(self._optimizer, check_for_nan=checks_for_nan(self._args))
        if updated:
            self._scheduler.step(1)
        return {
            **metrics.step_means(sums, scale.normalizer, self._device),
            **take_moe_losses(self._hf.num_layers, len(micro_batches)),
            "train/grad_norm": grad_norm,
            **{f"train/lr-pg_{i}": float(lr) for i, lr in enumerate(learning_rates)},
        }

    def _scale(self, batch: dict[str, Any], samples: Sequence[int], global_batch_size: int) -> StepScale:
        if not self._loss_config.calculate_per_token_loss:
            return StepScale(float(global_batch_size), self.dp_size)
        tokens = torch.cat([batch["loss_masks"][i] for i in samples]).sum().double()
        total = float(parallel.sum_over_data_parallel(tokens.view(1)))
        return StepScale(max(total, 1.0), self.dp_size)

    def _log_probs(self, stages: Sequence[torch.nn.Module], batch: dict[str, Any]) -> list[torch.Tensor]:
        """Log-probabilities of every sample's response tokens under a model, in batch order."""
        micro_batches, indices = self._micro_batches(batch, range(len(batch["tokens"])), forward_only=True)
        outputs = log_prob_pass(
            stages, micro_batches, vocab_size=self._hf.vocab_size, temperature=self._loss_config.temperature
        )
        return _in_batch_order(indices, outputs)

    def _micro_batches(
        self, batch: dict[str, Any], samples: Sequence[int], *, forward_only: bool = False
    ) -> tuple[list[MicroBatch], list[list[int]]]:
        """The micro-batches of these samples, and the batch positions in each."""
        lengths = [batch["total_lengths"][i] for i in samples]
        parts = micro_batch_indices(
            self._args,
            lengths,
            cp_size=self._layout.context,
            multiple_of=self._layout.micro_batch_multiple,
            forward_only=forward_only,
            max_over_dp=parallel.max_over_data_parallel,
        )
        indices = [[samples[i] for i in part] for part in parts]
        on_gpu = self._device.type == "cuda"
        return [
            micro_batch(
                batch,
                part,
                pad_multiple=pad_multiple(self._args, self._layout, on_gpu=on_gpu),
                with_layout=not use_transformer_engine(self._args),
            )
            for part in indices
        ], indices

    def _build_reference(self) -> list[torch.nn.Module] | None:
        """The frozen model that KL terms compare with; None where no flag uses one."""
        if not (self._loss_config.use_kl_loss or getattr(self._args, "kl_coef", None)):
            return None
        source = checkpoint.hf_directory(getattr(self._args, "ref_load", None) or self._args.hf_checkpoint)
        if HFModelConfig.from_dir(source) != self._hf:
            raise ValueError(
                f"--ref-load {source} has another config.json than --hf-checkpoint {self._args.hf_checkpoint}"
            )
        stages = build_model(self._hf, self._args, self._layout)
        load_hf_weights(stages, source, self._hf)
        return [stage.requires_grad_(False) for stage in stages]

    # --- weights for the engines -------------------------------------------------------------------------------------

    def hf_named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name and full tensor of every weight on rank 0, to be used before the next step; nothing on the
        other ranks, which must take part all the same."""
        for bucket in gathered_weights(self._plan, self._stages, self._hf, self._update_config.buffer_bytes):
            yield from bucket

    def weight_checksums(self) -> dict[str, str]:
        """Hugging Face name -> checksum of the weight as the engines receive it; every rank calls it."""
        dtype = self._update_config.dtype
        return {
            name: tensor_checksum(tensor if dtype is None else tensor.to(dtype))
            for piece in self._gathered_weights()
            for name, tensor in piece
        }

    def connect_engines(self, engine_urls: list[str]) -> None:
        """Form the weight-update group with these engines (rank 0; the other ranks have nothing to do)."""
        if not self.is_weight_source:
            return
        if self._updater is None:
            self._updater = make_updater(self._update_config)
        self._updater.connect(engine_urls)

    def update_weights(self, *, again: bool = False) -> dict[str, float]:
        """Push the weights to all connected engines as version `weight_version + 1`; returns timings (on rank 0).

        Every rank calls it, and every rank raises what rank 0 met.

        `again`: as `weight_version`, to engines that do not have it yet; nothing may have been trained since.

        Raises:
            WeightUpdateError: an engine refused or went silent; `weight_version` is unchanged, so that the same update
                can be repeated once `connect_engines` has replaced the group.
            ValueError: with --check-weight-update-equal, where an engine's weights differ afterwards.
        """
        version = self.weight_version + (not again)

        def send(pieces: Iterator[Piece]) -> dict[str, float]:
            if self._updater is None:
                raise RuntimeError("connect_engines() before update_weights()")
            return self._updater.update(pieces, version)

        timings = in_lockstep(self._gathered_weights(), send if self.is_weight_source else None)
        self.weight_version = version
        if getattr(self._args, "check_weight_update_equal", False):
            self._check_engines()
        return timings or {}

    def close(self) -> None:
        """Leave all groups, after the set that is being written. Idempotent; bounded even where engines are gone."""
        try:
            self.finish_saving()
        finally:
            self._leave_groups()

    def _leave_groups(self) -> None:
        if self._updater is not None:
            self._updater.close()
            self._updater = None
        forget_moe_losses()
        parallel.shutdown_distributed()

    def _gathered_weights(self) -> Iterator[Piece]:
        """All weights, in the trainer's number format, in pieces; every rank iterates it to the end."""
        return gathered_weights(self._plan, self._stages, self._hf, self._update_config.piece_bytes)

    def _check_engines(self) -> None:
        expected = self.weight_checksums()
        if not self.is_weight_source:
            return
        assert self._updater is not None
        for engine, found in zip(self._updater.engines, self._updater.checksums(), strict=True):
            compare_checksums(expected, found, engine.url)


class _Hooks:
    """The user's functions around training; each does nothing where its flag is not given."""

    def __init__(self, init: Any, before_log_prob: Any, before_train_step: Any, post_save: Any) -> None:
        self._init = init
        self._before_log_prob = before_log_prob
        self._before_train_step = before_train_step
        self._post_save = post_save

    @staticmethod
    def from_args(args: Namespace) -> _Hooks:
        names = (
            "custom_megatron_init_path",
            "custom_megatron_before_log_prob_hook_path",
            "custom_megatron_before_train_step_hook_path",
            "custom_megatron_post_save_hook_path",
        )
        return _Hooks(*(load_function(getattr(args, name, None)) for name in names))

    @property
    def wants_log_prob_pass(self) -> bool:
        """The hook runs before that pass, so the pass must happen."""
        return self._before_log_prob is not None

    def init(self, args: Namespace) -> None:
        if self._init:
            self._init(args)

    def before_log_prob(self, args: Namespace, stages: Sequence[torch.nn.Module]) -> None:
        if self._before_log_prob:
            self._before_log_prob(args, list(stages), "")

    def before_train_step(self, *call: Any) -> None:
        if self._before_train_step:
            self._before_train_step(*call)

    def post_save(self, args: Namespace, rollout_id: int, directory: str) -> None:
        if self._post_save:
            self._post_save(args, rollout_id, directory, directory)


def _in_batch_order(indices: list[list[int]], values: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Undo the cutting into micro-batches: the value of sample i at place i."""
    ordered: dict[int, torch.Tensor] = {}
    for part, row in zip(indices, values, strict=True):
        ordered.update(zip(part, row, strict=True))
    return [ordered[i] for i in sorted(ordered)]


def _set_threads(args: Namespace) -> None:
    """One thread on a CPU unless OMP_NUM_THREADS says otherwise: the engines need the other cores. With GPUs too, but
    for an optimizer in host memory, whose steps would take minutes: it gets this rank's share of the cores, two shares
    being left to engines and rollouts. Ray sets OMP_NUM_THREADS to 1 for its workers: 1 is not taken as the user's."""
    given = int(os.environ.get("OMP_NUM_THREADS") or 1)
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, given))
    elif given <= 1 and getattr(args, "optimizer_cpu_offload", False):
        ranks = getattr(args, "actor_num_gpus_per_node", None) or 1
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (ranks + 2)))
