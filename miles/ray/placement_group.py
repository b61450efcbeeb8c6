"""Which resources the trainers and the engines get: one bundle per machine that trains, one per machine of each engine.

A bundle lies on one machine. So the ranks of a training node are together, in the order in which they share tensors,
wherever Ray puts them; and an engine's process is shown the GPUs of its bundle only. Two bundles may lie on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles.ray.cluster import num_managers, num_trainers
from miles.ray.rollout.engine_size import EngineSize

if TYPE_CHECKING:
    from argparse import Namespace

    from ray.util.placement_group import PlacementGroup

_PLACEMENT_TIMEOUT_SECS = 60


@dataclass(frozen=True)
class Bundles:
    """A run of bundles in the placement group: those of the trainers, the engines, or the evaluation engines.

    Each has `num_gpus` GPUs and as many CPUs; `num_gpus` is 0 where the cluster has none.
    """

    group: PlacementGroup
    offset: int
    count: int
    num_gpus: int

    def actor_options(self, index: int, *, gpu_share: float | None = None) -> dict[str, Any]:
        """Ray options that put an actor into the bundle `index` of this run.

        `gpu_share`: how many GPUs the actor takes; None: all of the bundle. Where there are none it takes one CPU.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"bundle {index} of {self.count}")
        gpus = (self.num_gpus if gpu_share is None else gpu_share) if self.num_gpus else 0
        return {
            "num_cpus": gpus or 1,
            "num_gpus": gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.offset + index
            ),
        }


@dataclass(frozen=True)
class Placement:
    """The bundles of the run, trainers first."""

    trainers: Bundles
    engines: Bundles
    eval_engines: Bundles


def create_placement(args: Namespace) -> Placement:
    """Reserve the run's bundles: as many GPUs and CPUs as they need where the cluster has GPUs, else a CPU for each
    process.

    Raises ValueError at once where the cluster can never hold them, and after a minute where others hold what is
    needed.
    """
    engines, evals = EngineSize.from_args(args), EngineSize.of_evaluation(args)
    nodes, ranks = int(args.actor_num_nodes), int(args.actor_num_gpus_per_node)
    total = ray.cluster_resources()
    has_gpus = bool(total.get("GPU", 0))
    _check_room(args, total, engines, evals)
    bundles = [_bundle(ranks, has_gpus, processes=ranks)] * nodes
    for size in (engines, evals):
        bundles += [_bundle(size.gpus_per_node, has_gpus)] * size.num_bundles
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(_PLACEMENT_TIMEOUT_SECS):
        raise ValueError(
            f"no room in the Ray cluster after {_PLACEMENT_TIMEOUT_SECS} s for the bundles {bundles}: "
            f"total {total}, free {ray.available_resources()}"
        )
    first_eval = nodes + engines.num_bundles
    return Placement(
        trainers=Bundles(group, 0, nodes, ranks * has_gpus),
        engines=Bundles(group, nodes, engines.num_bundles, engines.gpus_per_node * has_gpus),
        eval_engines=Bundles(group, first_eval, evals.num_bundles, evals.gpus_per_node * has_gpus),
    )


def _bundle(gpus: int, has_gpus: bool, *, processes: int = 1) -> dict[str, float]:
    return {"CPU": float(gpus), "GPU": float(gpus)} if has_gpus else {"CPU": float(processes)}


def _check_room(args: Namespace, total: dict[str, float], engines: EngineSize, evals: EngineSize) -> None:
    """Raise ValueError where the cluster or its largest node is too small."""
    trainers = num_trainers(args)
    has_gpus = bool(total.get("GPU", 0))
    rollout, evaluation = (size.num_bundles * (size.gpus_per_node if has_gpus else 1) for size in (engines, evals))
    managers = num_managers(args)
    devices = trainers + rollout + evaluation
    for resource, count in {"CPU": devices + managers, "GPU": devices * has_gpus}.items():
        if count > total.get(resource, 0):
            raise ValueError(
                f"the run needs {count} {resource}s ({trainers} for training, {rollout} for rollout"
                f"{f', {evaluation} for evaluation' if evaluation else ''}"
                f"{f', {managers} for management' if resource == 'CPU' else ''}), the Ray cluster has "
                f"{total.get(resource, 0):g}: lower --actor-num-nodes, --actor-num-gpus-per-node, "
                f"--rollout-num-gpus{' or --eval-num-gpus' if evaluation else ''}, or enlarge the cluster"
            )
    resource = "GPU" if has_gpus else "CPU"
    largest = max((node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]), default=0)
    if args.actor_num_gpus_per_node > largest:
        raise ValueError(
            f"--actor-num-gpus-per-node {args.actor_num_gpus_per_node}: no node of the Ray cluster has more than "
            f"{largest:g} {resource}s. Instead: more nodes (--actor-num-nodes) with fewer ranks each"
        )
    if has_gpus:
        wanted = max(size.gpus_per_node for size in (engines, evals) if size.count) if rollout + evaluation else 0
        if wanted > largest:
            raise ValueError(
                f"an engine needs {wanted} GPUs of one node, and no node of the Ray cluster has more than {largest:g}. "
                "Instead: --num-gpus-per-node with what a node has, so that an engine spans several, or a smaller "
                "--rollout-num-gpus-per-engine or --eval-num-gpus-per-engine"
            )
