"""Flags that say how the model is split over trainer ranks, and how experts are run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.backends.megatron_utils.hf_config import HFModelConfig
from miles.backends.megatron_utils.layout import ParallelLayout, layers_from
from miles.utils.flag_rules import require, require_not_negative, require_positive

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

NO_EFFECT = {"moe_grouped_gemm": "experts run as one grouped kernel where Transformer Engine is used, and only there"}
_SIZES = (
    ("tensor-model", "that share each layer"),
    ("pipeline-model", "that share the layers among them"),
    ("context", "that share each sequence"),
    ("expert-model", "that share the experts"),
    ("expert-tensor", "that share each expert"),
)


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    _add_parallel_flags(parser)
    _add_expert_flags(parser)


def _add_parallel_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("model parallelism")
    for size, what in _SIZES:
        default = None if size == "expert-tensor" else 1
        note = " None: --tensor-model-parallel-size." if default is None else ""
        group.add_argument(
            f"--{size}-parallel-size", type=int, default=default, help=f"Number of trainer ranks {what}.{note}"
        )
    group.add_argument(
        "--num-virtual-stages-per-pipeline-rank",
        type=int,
        default=1,
        help="Pieces of the model on each pipeline rank, interleaved with the others': less waiting, more traffic.",
    )
    for which in ("first", "last"):
        group.add_argument(
            f"--decoder-{which}-pipeline-num-layers",
            type=int,
            default=None,
            help=f"Layers of the {which} pipeline rank. None: as many as the others have.",
        )
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        default=False,
        help="Split activations along the sequence over tensor-parallel ranks.",
    )


def _add_expert_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("experts")
    group.add_argument(
        "--moe-token-dispatcher-type",
        type=str,
        default="alltoall",
        choices=["allgather", "alltoall", "flex"],
        help="How tokens reach their experts; allgather cannot take micro batches of different lengths, so it is "
        "alltoall.",
    )
    group.add_argument(
        "--moe-enable-deepep", action="store_true", default=False, help="Dispatch with DeepEP (with flex, on GPUs)."
    )
    group.add_argument(
        "--moe-permute-fusion",
        action="store_true",
        default=False,
        help="Fuse the permutation of tokens to experts (Transformer Engine).",
    )
    group.add_argument(
        "--moe-grouped-gemm", action="store_true", default=False, help="Run a rank's experts in one kernel."
    )
    group.add_argument(
        "--moe-router-dtype",
        type=str,
        default=None,
        choices=["fp32", "fp64"],
        help="Precision in which experts are chosen and weighed. None: fp32.",
    )
    group.add_argument(
        "--moe-aux-loss-coeff", type=float, default=0.0, help="Weight of the load-balancing loss. 0: none."
    )
    group.add_argument(
        "--moe-router-load-balancing-type",
        type=str,
        default="aux_loss",
        choices=["aux_loss", "seq_aux_loss", "global_aux_loss", "none"],
        help="What the load is balanced over: a micro batch, a sequence, all ranks' micro batches, nothing.",
    )


def resolve(args: Namespace) -> None:
    """Fill in the defaults that depend on other flags."""
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size


def validate(args: Namespace) -> None:
    """Raise ValueError where the sizes fit neither the ranks nor the model."""
    sizes = tuple(f"{size.replace('-', '_')}_parallel_size" for size, _ in _SIZES)
    require_positive(args, *sizes, "num_virtual_stages_per_pipeline_rank")
    require_positive(args, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    require_positive(args, "recompute_num_layers")
    require_not_negative(args, "moe_aux_loss_coeff")
    require(
        not args.moe_enable_deepep or args.moe_token_dispatcher_type == "flex",
        f"--moe-enable-deepep needs --moe-token-dispatcher-type flex, got {args.moe_token_dispatcher_type}",
    )
    require(
        args.context_parallel_size == 1 or args.loss_type != "custom_loss",
        f"--context-parallel-size {args.context_parallel_size} does not go with --loss-type custom_loss: the function "
        "gets the logits of whole sequences",
    )
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if world % model:
        return  # told by miles.backends.training_utils.flags, which divides the samples among the ranks
    layout = ParallelLayout.from_args(args, world)
    try:
        hf = HFModelConfig.from_dir(args.hf_checkpoint)
    except (ValueError, TypeError):
        return  # told by miles.backends.megatron_utils.model_shape_flags
    layout.check_model(hf, **layers_from(args))


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        yield "--sequence-parallel has no effect with --tensor-model-parallel-size 1"
    if "moe_token_dispatcher_type" in given and args.moe_token_dispatcher_type == "allgather":
        yield "--moe-token-dispatcher-type allgather has no effect: alltoall is used"
