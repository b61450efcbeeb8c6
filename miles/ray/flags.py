"""Flags of the cluster, of the drivers' loop and of weight updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.ray.faults import tolerates_engine_faults
from miles.utils.flag_rules import require, require_positive

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    _add_cluster_flags(parser)
    _add_weight_flags(parser)


def _add_cluster_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("cluster")
    group.add_argument("--actor-num-nodes", type=int, default=1, help="Nodes that train.")
    group.add_argument(
        "--actor-num-gpus-per-node",
        type=int,
        default=8,
        help="Trainer ranks on each of these nodes: GPUs, or processes where there is none.",
    )
    group.add_argument(
        "--rollout-num-gpus",
        type=int,
        default=None,
        help="GPUs (or processes where there is none) for engines, in all. None: one engine.",
    )
    group.add_argument("--rollout-num-gpus-per-engine", type=int, default=1, help="GPUs of one engine.")
    group.add_argument(
        "--share-one-gpu",
        action="store_true",
        default=False,
        help="One trainer rank and one embedded engine on the same GPU, both in its memory all the time: for trying "
        "things out on a single device. Without a GPU nothing changes.",
    )
    group.add_argument(
        "--num-gpus-per-node",
        type=int,
        default=8,
        help="GPUs of one node: an engine with more of them spans nodes.",
    )


def _add_weight_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("weight updates")
    group.add_argument(
        "--update-weights-interval",
        type=int,
        default=1,
        help="Send weights to the engines after every this many rollouts (train_async.py).",
    )
    group.add_argument(
        "--pause-generation-mode",
        type=str,
        default="retract",
        choices=["abort", "retract", "in_place"],
        help="What a weight update does to running requests. abort: end them as they are. retract: continue them from "
        "their tokens with a recomputed cache. in_place: continue them with the old cache.",
    )
    group.add_argument(
        "--update-weight-buffer-size",
        type=int,
        default=512 * 1024**2,
        help="Bytes of one bucket of weights.",
    )
    group.add_argument(
        "--update-weight-transfer-mode",
        default="broadcast",
        choices=["broadcast", "p2p", "disk-delta"],
        help="How weights travel. broadcast: torch.distributed, from trainer rank 0 to every engine. disk-delta: by "
        "files in --update-weight-disk-dir, for engines that cannot join a group; files that did not change are "
        "linked, not written.",
    )
    group.add_argument(
        "--update-weight-disk-dir",
        type=str,
        default=None,
        help="Directory that trainer and engines see under this path, for --update-weight-transfer-mode disk-delta. It "
        "belongs to one run at a time. None: no files.",
    )
    group.add_argument(
        "--update-weight-group",
        type=str,
        default=None,
        choices=["own", "shared"],
        help="own: each engine has a group of its own with trainer rank 0, and what becomes of one within a weight "
        "update does not reach the others; weights leave rank 0 once for each engine. shared: one group of all, to "
        "which they are sent once; over NCCL, engines that wait in it for one that dies or hangs are lost with it. "
        "None: shared over NCCL without --use-fault-tolerance, else own.",
    )
    group.add_argument(
        "--update-weight-timeout-secs",
        type=float,
        default=120.0,
        help="Longest wait for an engine within a weight update: to join the group, to take one bucket, to answer one "
        "call. An engine that takes longer counts as hung. Below --distributed-timeout-minutes.",
    )
    group.add_argument(
        "--check-weight-update-equal",
        action="store_true",
        default=False,
        help="After each update compare weight checksums of engines and trainer; stop the run on a difference.",
    )


def resolve(args: Namespace) -> None:
    """Fill in the defaults that depend on other flags."""
    if args.rollout_num_gpus is None:
        args.rollout_num_gpus = args.rollout_num_gpus_per_engine
    if args.ci_test and not args.ci_disable_weight_update_checker and args.rollout_engine == "embedded":
        args.check_weight_update_equal = True
    if args.update_weight_group is None and tolerates_engine_faults(args):
        args.update_weight_group = "own"


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    require_positive(
        args,
        "actor_num_nodes",
        "actor_num_gpus_per_node",
        "rollout_num_gpus",
        "rollout_num_gpus_per_engine",
        "num_gpus_per_node",
        "update_weights_interval",
        "update_weight_buffer_size",
        "update_weight_timeout_secs",
    )
    require(
        args.update_weight_transfer_mode != "disk-delta" or bool(args.update_weight_disk_dir),
        "--update-weight-transfer-mode disk-delta needs --update-weight-disk-dir",
    )
    require(
        args.update_weight_timeout_secs < 60 * args.distributed_timeout_minutes,
        f"--update-weight-timeout-secs {args.update_weight_timeout_secs:g} must be below --distributed-timeout-minutes "
        f"{args.distributed_timeout_minutes}: the other trainer ranks wait meanwhile",
    )
    require(
        args.rollout_num_gpus % args.rollout_num_gpus_per_engine == 0,
        f"--rollout-num-gpus {args.rollout_num_gpus} does not divide into engines of --rollout-num-gpus-per-engine "
        f"{args.rollout_num_gpus_per_engine}",
    )

    if args.share_one_gpu:
        _validate_sharing(args)


def _validate_sharing(args: Namespace) -> None:
    """One trainer, one engine, and nobody else."""
    alone = args.actor_num_nodes * args.actor_num_gpus_per_node == 1 and args.rollout_num_gpus == 1
    require(
        alone and not getattr(args, "eval_num_gpus", 0),
        f"--share-one-gpu is for one trainer rank and one engine, got --actor-num-nodes {args.actor_num_nodes}, "
        f"--actor-num-gpus-per-node {args.actor_num_gpus_per_node}, --rollout-num-gpus {args.rollout_num_gpus}, "
        f"--eval-num-gpus {getattr(args, 'eval_num_gpus', 0)}. Instead: 1, 1, 1 and 0, or a GPU for each",
    )
    require(
        args.rollout_engine == "embedded",
        f"--share-one-gpu needs --rollout-engine embedded, got {args.rollout_engine}: weights reach the engine through "
        "host memory then, since NCCL wants a device for each rank",
    )


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    if args.update_weight_disk_dir and args.update_weight_transfer_mode != "disk-delta":
        yield "--update-weight-disk-dir has no effect without --update-weight-transfer-mode disk-delta"
    if args.update_weight_group and args.update_weight_transfer_mode == "disk-delta":
        yield "--update-weight-group has no effect with --update-weight-transfer-mode disk-delta"
    if args.ci_disable_weight_update_checker and not args.ci_test:
        yield "--ci-disable-weight-update-checker has no effect without --ci-test"
