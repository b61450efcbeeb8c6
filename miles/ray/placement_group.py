"""Which resources the trainers and the engines get: one bundle per rank and per engine GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles.ray.cluster import num_eval_gpus, num_managers, num_trainers

if TYPE_CHECKING:
    from argparse import Namespace

    from ray.util.placement_group import PlacementGroup

_PLACEMENT_TIMEOUT_SECS = 60


@dataclass(frozen=True)
class Bundles:
    """A run of bundles in the placement group: those of the trainers, the engines, or the evaluation engines."""

    group: PlacementGroup
    offset: int
    count: int
    num_gpus: int

    def actor_options(self, index: int, *, gpu_share: float) -> dict[str, Any]:
        """Ray options that put an actor into the bundle `index` of this run."""
        if not 0 <= index < self.count:
            raise IndexError(f"bundle {index} of {self.count}")
        return {
            "num_cpus": 1 if not self.num_gpus else gpu_share,
            "num_gpus": gpu_share if self.num_gpus else 0,
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
    """Reserve the run's bundles: a GPU and a CPU each where the cluster has GPUs, else a CPU.

    Raises ValueError at once where the cluster can never hold them, and after a minute where others hold what is
    needed.
    """
    trainers, engines, evals = num_trainers(args), int(args.rollout_num_gpus), num_eval_gpus(args)
    bundles, managers = trainers + engines + evals, num_managers(args)
    total = ray.cluster_resources()
    gpus_per_bundle = 1 if total.get("GPU", 0) else 0
    needed = {"CPU": bundles + managers, "GPU": bundles * gpus_per_bundle}
    for resource, count in needed.items():
        if count > total.get(resource, 0):
            raise ValueError(
                f"the run needs {count} {resource}s ({trainers} for training, {engines} for rollout"
                f"{f', {evals} for evaluation' if evals else ''}"
                f"{f', {managers} for management' if resource == 'CPU' else ''}), the Ray cluster has "
                f"{total.get(resource, 0):g}: lower --actor-num-nodes, --actor-num-gpus-per-node, "
                f"--rollout-num-gpus{' or --eval-num-gpus' if evals else ''}, or enlarge the cluster"
            )
    bundle = {"CPU": 1.0, "GPU": 1.0} if gpus_per_bundle else {"CPU": 1.0}
    group = placement_group([bundle] * bundles, strategy="PACK")
    if not group.wait(_PLACEMENT_TIMEOUT_SECS):
        raise ValueError(
            f"no room in the Ray cluster after {_PLACEMENT_TIMEOUT_SECS} s for {bundles} bundles of "
            f"{bundle}: total {total}, free {ray.available_resources()}"
        )
    return Placement(
        trainers=Bundles(group, 0, trainers, gpus_per_bundle),
        engines=Bundles(group, trainers, engines, gpus_per_bundle),
        eval_engines=Bundles(group, trainers + engines, evals, gpus_per_bundle),
    )
