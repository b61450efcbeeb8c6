"""megatron-core's data-parallel wrapper, optimizer and learning-rate schedule, from the flags."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config

from miles.utils.devices import transformer_engine_installed

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from megatron.core.optimizer import MegatronOptimizer

logger = logging.getLogger(__name__)


def wrap_data_parallel(stages: Sequence[torch.nn.Module], args: Namespace) -> list[DistributedDataParallel]:
    """Gradients accumulate in one flat buffer a stage over micro-batches and are reduced once, behind the last."""
    config = get_model_config(stages[0])
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=bool(getattr(args, "accumulate_allreduce_grads_in_fp32", False)) or config.bf16,
        overlap_grad_reduce=False,
        use_distributed_optimizer=bool(getattr(args, "use_distributed_optimizer", False)),
        check_for_nan_in_grad=False,  # `optimizer_step` looks at the reduced norm instead
    )
    wrapped = [DistributedDataParallel(config=config, ddp_config=ddp_config, module=stage) for stage in stages]
    no_sync = [stage.no_sync for stage in wrapped]
    config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def checks_for_nan(args: Namespace) -> bool:
    """Whether a NaN or infinite gradient is an error (the default) or skips the optimizer step."""
    return bool(getattr(args, "check_for_nan_in_loss_and_grad", True))


def build_optimizer(stages: Sequence[torch.nn.Module], args: Namespace) -> MegatronOptimizer:
    """AdamW (or SGD) as megatron-core builds it: no weight decay on norms and biases.

    Raises:
        ValueError: an optimizer or option that this version does not have.
    """
    kind = getattr(args, "optimizer", "adam")
    if kind not in ("adam", "sgd"):
        raise ValueError(f"--optimizer must be adam or sgd, got {kind!r}")
    distributed = bool(getattr(args, "use_distributed_optimizer", False))
    if distributed and kind != "adam":
        raise ValueError(f"--use-distributed-optimizer needs --optimizer adam, got {kind!r}")
    config = OptimizerConfig(
        optimizer=kind,
        lr=args.lr,
        min_lr=_or(args, "min_lr", 0.0),
        weight_decay=_or(args, "weight_decay", 0.01),
        adam_beta1=_or(args, "adam_beta1", 0.9),
        adam_beta2=_or(args, "adam_beta2", 0.999),
        adam_eps=_or(args, "adam_eps", 1e-8),
        clip_grad=_or(args, "clip_grad", 1.0) or math.inf,
        bf16=bool(getattr(args, "bf16", False)),
        params_dtype=torch.bfloat16 if getattr(args, "bf16", False) else torch.float32,
        use_distributed_optimizer=distributed,
        **_memory_options(args),
    )
    optimizer = get_megatron_optimizer(config, list(stages), use_gloo_process_groups=False)
    get_model_config(stages[0]).grad_scale_func = optimizer.scale_loss if config.bf16 else None
    return optimizer


def _memory_options(args: Namespace) -> dict[str, Any]:
    """Where the optimizer's state lies. Without a GPU all of it is in CPU memory anyway."""
    if not torch.cuda.is_available():
        return {}
    offload = bool(getattr(args, "optimizer_cpu_offload", False))
    precision_aware = bool(getattr(args, "use_precision_aware_optimizer", False))
    if precision_aware and not transformer_engine_installed():
        raise ValueError(
            "--use-precision-aware-optimizer and --optimizer-cpu-offload need the package transformer_engine"
        )
    return {
        "optimizer_cpu_offload": offload,
        "optimizer_offload_fraction": 1.0 if offload else 0.0,
        "overlap_cpu_optimizer_d2h_h2d": bool(getattr(args, "overlap_cpu_optimizer_d2h_h2d", False)),
        "use_precision_aware_optimizer": precision_aware,
        # Else master weights would be kept as the 16 bits that bf16 lacks, and saved as if these were numbers.
        "store_param_remainders": False,
    }


def optimizer_step(optimizer: MegatronOptimizer, *, check_for_nan: bool) -> tuple[bool, float]:
    """Clip and apply the reduced gradients: (whether the weights were updated, the gradient norm before clipping).

    A NaN or infinite norm is an error with `check_for_nan`; without, the step is skipped and the weights stay.

    Raises:
        FloatingPointError: see above.
    """
    found_inf = optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm):
        if check_for_nan:
            raise FloatingPointError(
                f"the gradient norm is {grad_norm}; --no-check-for-nan-in-loss-and-grad skips such a step instead"
            )
        logger.warning("the gradient norm is %s: this optimizer step is skipped", grad_norm)
        return False, grad_norm
    if found_inf:
        return False, grad_norm
    if grad_norm > optimizer.config.clip_grad:
        for inner in optimizer.chained_optimizers:  # experts have one of their own
            if not inner.is_stub_optimizer and inner.get_parameters():
                clip_grad_by_total_norm_fp32(
                    inner.get_parameters(),
                    inner.config.clip_grad,
                    grad_norm,
                    use_decoupled_grad=inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
    return bool(optimizer.step_with_ready_grads()), grad_norm


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over optimizer steps: linear warm-up from 0, then decay to `min_lr`."""

    lr: float
    min_lr: float
    warmup_steps: int
    decay_steps: int
    style: str

    @staticmethod
    def from_args(args: Namespace) -> ScheduleConfig:
        """Raises ValueError naming the flag that does not fit."""
        style = _or(args, "lr_decay_style", "linear")
        min_lr = _or(args, "min_lr", 0.0)
        if min_lr > args.lr:
            raise ValueError(f"--min-lr must not exceed --lr ({args.lr}), got {min_lr}")
        decay = getattr(args, "lr_decay_iters", None) or total_optimizer_steps(args)
        if decay is None:
            if style != "constant":
                raise ValueError(f"--lr-decay-style {style} needs --lr-decay-iters or --num-rollout")
            decay = 2**31
        fraction = getattr(args, "lr_warmup_fraction", None)
        warmup = int(fraction * decay) if fraction is not None else _or(args, "lr_warmup_iters", 0)
        if warmup >= decay and getattr(args, "lr_decay_iters", None):
            raise ValueError(f"--lr-warmup-iters must be below --lr-decay-iters {decay}, got {warmup}")
        decay = max(decay, warmup + 1)  # a run that ends within its warm-up, such as a first try of a few steps
        return ScheduleConfig(lr=args.lr, min_lr=min_lr, warmup_steps=warmup, decay_steps=decay, style=style)


def total_optimizer_steps(args: Namespace) -> int | None:
    """Optimizer steps of the whole run, or None where the number of rollouts is not known."""
    num_rollout = getattr(args, "num_rollout", None)
    if not num_rollout:
        return None
    return num_rollout * steps_per_rollout(args)


def steps_per_rollout(args: Namespace) -> int:
    """Optimizer steps made of one rollout: `--num-steps-per-rollout`, or samples / `--global-batch-size`, or 1."""
    explicit = getattr(args, "num_steps_per_rollout", None)
    if explicit:
        return int(explicit)
    global_batch_size = getattr(args, "global_batch_size", None)
    samples = args.rollout_batch_size * getattr(args, "n_samples_per_prompt", 1)
    return max(1, samples // global_batch_size) if global_batch_size else 1


def build_scheduler(optimizer: MegatronOptimizer, args: Namespace) -> OptimizerParamScheduler:
    """megatron-core's scheduler, counted in optimizer steps."""
    config = ScheduleConfig.from_args(args)
    weight_decay = _or(args, "weight_decay", 0.01)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps,
        lr_decay_style=config.style,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=config.decay_steps,
        wd_incr_style="constant",
    )


def _or(args: Namespace, name: str, default: Any) -> Any:
    """The attribute, or `default` where it is missing or None."""
    value = getattr(args, name, None)
    return default if value is None else value
