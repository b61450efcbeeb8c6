"""Flags of the trainer: precision, optimizer, learning-rate schedule, checkpoints and hooks."""

from __future__ import annotations

import os
import string
from typing import TYPE_CHECKING

from miles.utils.devices import cuda_device_present, transformer_engine_installed
from miles.utils.flag_rules import flag_name, require, require_fraction, require_not_negative, require_positive

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

PLUGIN_PATHS = (
    "custom_megatron_init_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
    "custom_megatron_post_save_hook_path",
)
NO_EFFECT = {
    "attention_softmax_in_fp32": "the attention kernel computes its softmax in fp32 anyway",
    "gradient_accumulation_fusion": "this kernel fusion is off already",
    "apply_rope_fusion": "this kernel fusion is off already",
    "make_vocab_size_divisible_by": "the vocabulary keeps the size of the checkpoint",
    "padded_vocab_size": "the vocabulary keeps the size of the checkpoint",
}


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    _add_backend_flags(parser)
    _add_precision_flags(parser)
    _add_memory_flags(parser)
    _add_optimizer_flags(parser)
    _add_checkpoint_flags(parser)
    _add_hook_flags(parser)


def _add_backend_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("trainer backend")
    group.add_argument(
        "--train-backend", type=str, default="megatron", choices=["megatron", "fsdp"], help="Training backend."
    )
    group.add_argument(
        "--distributed-backend",
        type=str,
        default="nccl",
        help="torch.distributed backend: nccl with a CUDA device (needs it), gloo without.",
    )
    group.add_argument(
        "--distributed-timeout-minutes", type=int, default=10, help="Longest wait of a collective operation, minutes."
    )
    group.add_argument(
        "--qkv-format",
        type=str,
        default="thd",
        choices=["thd", "bshd"],
        help="Layout of sequences in a micro batch; thd: packed, without padding between them.",
    )
    group.add_argument(
        "--megatron-to-hf-mode",
        default="raw",
        choices=["raw", "bridge"],
        help="How weights are named for Hugging Face; raw: the built-in converter.",
    )
    group.add_argument(
        "--transformer-impl",
        default=None,
        choices=["local", "transformer_engine"],
        help="Layers that the model is built from. local: megatron-core's own. None: Transformer Engine's where there "
        "is a CUDA device and the package is installed, else local.",
    )


def _add_precision_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("trainer precision")
    group.add_argument(
        "--bf16", action="store_true", default=False, help="Train in bfloat16 with fp32 main weights. Off: fp32."
    )
    group.add_argument(
        "--accumulate-allreduce-grads-in-fp32",
        action="store_true",
        default=False,
        help="Accumulate and reduce gradients in fp32 (as with --bf16 anyway).",
    )
    group.add_argument(
        "--attention-softmax-in-fp32", action="store_true", default=False, help="Compute attention's softmax in fp32."
    )
    group.add_argument("--hidden-dropout", type=float, default=0.0, help="Dropout of hidden states, training only.")
    group.add_argument("--attention-dropout", type=float, default=0.0, help="Dropout of attention, training only.")
    group.add_argument(
        "--no-check-for-nan-in-loss-and-grad",
        action="store_false",
        dest="check_for_nan_in_loss_and_grad",
        help="Skip the optimizer step on a NaN or infinite gradient norm. Off: stop with an error.",
    )
    group.add_argument(
        "--deterministic-mode",
        action="store_true",
        default=False,
        help="Use deterministic algorithms only; an operation without one is an error.",
    )


def _add_memory_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("trainer memory and kernels")
    group.add_argument(
        "--attention-backend",
        type=str,
        default=None,
        choices=["auto", "flash", "fused", "unfused", "local"],
        help="Attention kernel of Transformer Engine: flash is the package flash-attn, fused cuDNN's. None: the "
        "fastest that fits. No effect without Transformer Engine, where PyTorch chooses.",
    )
    group.add_argument(
        "--recompute-granularity",
        type=str,
        default=None,
        choices=["full", "selective"],
        help="Recompute activations in the backward pass. None: keep them.",
    )
    group.add_argument(
        "--recompute-method",
        type=str,
        default=None,
        choices=["uniform", "block"],
        help="Which layers are recomputed. None: none.",
    )
    group.add_argument(
        "--recompute-num-layers", type=int, default=None, help="Layers per recomputed piece. None: none is recomputed."
    )
    for flag, what in (
        (
            "--optimizer-cpu-offload",
            "Keep optimizer states and master weights in CPU memory, and update there. Implies "
            "--use-precision-aware-optimizer.",
        ),
        ("--overlap-cpu-optimizer-d2h-h2d", "Overlap the copies of an offloaded optimizer with its arithmetic."),
        (
            "--use-precision-aware-optimizer",
            "Let the optimizer itself hold the master weights. Implies --use-distributed-optimizer.",
        ),
    ):
        group.add_argument(flag, action="store_true", default=False, help=what)
    group.add_argument(
        "--no-gradient-accumulation-fusion",
        action="store_false",
        dest="gradient_accumulation_fusion",
        help="Do not fuse gradient accumulation into the weight-gradient kernel.",
    )
    group.add_argument(
        "--no-rope-fusion", action="store_false", dest="apply_rope_fusion", help="Do not fuse rotary embeddings."
    )
    group.add_argument(
        "--make-vocab-size-divisible-by", type=int, default=128, help="Pad the vocabulary to a multiple of this."
    )
    group.add_argument(
        "--padded-vocab-size", type=int, default=None, help="Size of the padded vocabulary. None: no padding."
    )


def _add_optimizer_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", type=str, default="adam", choices=["adam", "sgd"], help="adam is AdamW.")
    group.add_argument(
        "--use-distributed-optimizer",
        action="store_true",
        default=False,
        help="Share the optimizer's state among data-parallel ranks (adam only). Results are the same.",
    )
    group.add_argument("--lr", type=float, default=1e-06, help="Largest learning rate. 0: weights never change.")
    group.add_argument("--min-lr", type=float, default=0.0, help="Smallest learning rate of the decay.")
    group.add_argument(
        "--lr-decay-style",
        type=str,
        default="linear",
        choices=["constant", "linear", "cosine", "inverse-square-root"],
        help="Shape of the learning rate after warm-up.",
    )
    group.add_argument(
        "--lr-decay-iters",
        type=int,
        default=None,
        help="Optimizer steps until --min-lr is reached, warm-up included. None: all steps of the run.",
    )
    group.add_argument(
        "--lr-warmup-iters", type=int, default=0, help="Optimizer steps of linear warm-up from 0. 0: none."
    )
    group.add_argument(
        "--lr-warmup-fraction",
        type=float,
        default=None,
        help="Warm-up as a fraction of --lr-decay-iters, 0 to 1. None: --lr-warmup-iters.",
    )
    group.add_argument("--weight-decay", type=float, default=0.01, help="Decoupled weight decay. 0: none.")
    group.add_argument("--adam-beta1", type=float, default=0.9, help="Decay of Adam's first moment.")
    group.add_argument("--adam-beta2", type=float, default=0.999, help="Decay of Adam's second moment.")
    group.add_argument("--adam-eps", type=float, default=1e-8, help="Added to Adam's denominator.")
    group.add_argument("--clip-grad", type=float, default=1.0, help="Largest global gradient norm. 0: no clipping.")
    group.add_argument("--seed", type=int, default=1234, help="Seed of the trainer.")


def _add_checkpoint_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--load",
        type=str,
        default=None,
        help="Directory with the checkpoints of a run, to go on from the newest, or a Hugging Face checkpoint, whose "
        "weights are taken. None, or a directory with neither: start from --hf-checkpoint.",
    )
    group.add_argument(
        "--save",
        type=str,
        default=None,
        help="Directory for checkpoints; one that holds some already must be that of --load. None: none is written.",
    )
    group.add_argument(
        "--save-interval", type=int, default=None, help="Save after every this many rollouts. None: never."
    )
    group.add_argument(
        "--async-save",
        action="store_true",
        default=False,
        help="Write checkpoints beside the training, from a copy of the state in CPU memory.",
    )
    group.add_argument(
        "--save-hf",
        type=str,
        default=None,
        help="Also export a Hugging Face checkpoint at each save; a directory, in which {rollout_id} is replaced. "
        "None: no export.",
    )
    group.add_argument(
        "--save-trigger-sentinel",
        type=str,
        default=None,
        help="File whose appearance asks for a save after the running step; it is removed then. None: not watched.",
    )
    group.add_argument(
        "--no-save-optim",
        action="store_true",
        default=False,
        help="Save weights only; optimizer and schedule then start anew on --load.",
    )
    group.add_argument(
        "--reset-optimizer-states",
        action="store_true",
        default=False,
        help="With --load: take the weights, start optimizer and schedule anew.",
    )
    group.add_argument(
        "--start-rollout-id",
        type=int,
        default=None,
        help="Number of the first rollout. None: the one after the loaded checkpoint, or 0.",
    )


def _add_hook_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("trainer hooks")
    for flag, signature, when in (
        ("--custom-megatron-init-path", "(args)", "when the trainer has initialised"),
        ("--custom-megatron-before-log-prob-hook-path", "(args, model, store_prefix)", "before each log-prob pass"),
        (
            "--custom-megatron-before-train-step-hook-path",
            "(args, rollout_id, step_id, model, optimizer, scheduler)",
            "before each optimizer step",
        ),
        (
            "--custom-megatron-post-save-hook-path",
            "(args, rollout_id, checkpoint_dir, hf_dir)",
            "after each save, on rank 0",
        ),
    ):
        group.add_argument(
            flag, type=str, default=None, help=f"Dotted path of fn{signature}, called {when}. None: nothing."
        )


def resolve(args: Namespace) -> None:
    """Fill in what other flags imply."""
    args.use_precision_aware_optimizer |= args.optimizer_cpu_offload
    args.use_distributed_optimizer |= args.use_precision_aware_optimizer


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    require_positive(args, "save_interval", "distributed_timeout_minutes", "lr_decay_iters", "adam_eps")
    require_not_negative(args, "lr", "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad", "start_rollout_id")
    require_fraction(args, "lr_warmup_fraction", "hidden_dropout", "attention_dropout")
    for dest in ("adam_beta1", "adam_beta2"):
        value = getattr(args, dest)
        require(0 <= value < 1, f"--{dest.replace('_', '-')} must be in [0, 1), got {value}")
    require(
        args.distributed_backend in ("nccl", "gloo"),
        f"--distributed-backend must be nccl or gloo, got {args.distributed_backend!r}",
    )
    require(args.min_lr <= args.lr, f"--min-lr ({args.min_lr}) must not be above --lr ({args.lr})")
    require(
        args.lr_warmup_fraction is None or args.lr_warmup_iters == 0,
        "--lr-warmup-fraction and --lr-warmup-iters exclude each other",
    )
    require(
        args.transformer_impl != "transformer_engine" or transformer_engine_installed(),
        "--transformer-impl transformer_engine needs the package transformer_engine, which is not installed. "
        "Instead: local",
    )
    require(
        not args.use_distributed_optimizer or args.optimizer == "adam",
        f"--use-distributed-optimizer needs --optimizer adam, got {args.optimizer}",
    )
    require(
        args.bf16 or not args.optimizer_cpu_offload or not cuda_device_present(),
        "--optimizer-cpu-offload needs --bf16: it keeps fp32 copies of bf16 weights in CPU memory",
    )
    require(
        not (args.use_precision_aware_optimizer and cuda_device_present()) or transformer_engine_installed(),
        "--use-precision-aware-optimizer and --optimizer-cpu-offload need the package transformer_engine on GPUs, "
        "which is not installed. Instead: install it (docs/user-guide/cluster.md), or --use-distributed-optimizer",
    )
    require(
        args.recompute_granularity != "full" or (bool(args.recompute_method) and args.recompute_num_layers is not None),
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
    )
    _validate_checkpoints(args)


def _validate_checkpoints(args: Namespace) -> None:
    if args.save_interval is not None:
        require(args.save is not None, "--save-interval needs --save, the directory for checkpoints")
    require(not args.async_save or args.save is not None, "--async-save needs --save, the directory for checkpoints")
    if args.save_trigger_sentinel is not None:
        require(args.save is not None, "--save-trigger-sentinel needs --save, the directory for checkpoints")
    if args.save_hf is not None:
        require(args.save is not None, "--save-hf exports at each save, so it needs --save and --save-interval")
        fields = {name for _, name, _, _ in string.Formatter().parse(args.save_hf) if name is not None}
        require(
            fields <= {"rollout_id"}, f"--save-hf may contain {{rollout_id}} only, got {args.save_hf!r} with {fields}"
        )
    require(
        not args.start_rollout_id or args.num_rollout is None or args.start_rollout_id < args.num_rollout,
        f"--start-rollout-id {args.start_rollout_id} leaves nothing to do: rollouts are numbered from 0, and "
        f"--num-rollout {args.num_rollout} counts those before it, too",
    )
    for dest in ("save", "load"):
        path = getattr(args, dest)
        require(
            path is None or not os.path.exists(path) or os.path.isdir(path), f"--{dest} {path!r} is not a directory"
        )


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    if args.lr_decay_style == "constant" and given & {"min_lr", "lr_decay_iters"}:
        yield "--min-lr and --lr-decay-iters have no effect with --lr-decay-style constant"
    if args.no_save_optim and args.save is None:
        yield "--no-save-optim has no effect without --save"
    if args.reset_optimizer_states and args.load is None:
        yield "--reset-optimizer-states has no effect without --load"
    if args.start_rollout_id and args.load is None:
        yield (
            f"--start-rollout-id {args.start_rollout_id} has no effect without --load but for the numbers of the "
            "rollouts, and for a data source of your own: weights and prompts start from the beginning"
        )
    offload = given & {"optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer"}
    if offload and not cuda_device_present():
        flags = ", ".join(sorted(map(flag_name, offload)))
        yield f"no effect without a GPU, where optimizer states are in CPU memory anyway: {flags}"
    if "attention_backend" in given and (args.transformer_impl == "local" or not transformer_engine_installed()):
        yield (
            "--attention-backend has no effect here because PyTorch's scaled_dot_product_attention, which is used "
            "without Transformer Engine, chooses its kernel itself"
        )
    if args.recompute_granularity != "full" and given & {"recompute_method", "recompute_num_layers"}:
        yield "--recompute-method and --recompute-num-layers have no effect without --recompute-granularity full"
