"""Which resources the trainers and the engines get, in bundles that Ray places.

with GPUs      a bundle for the trainer ranks of each node, and one for each engine on each of its nodes: what must
               be near each other is one bundle, and Ray shows each process its own GPUs only
without        a bundle of one CPU for each trainer rank and each engine, on whichever machine
--share-one-gpu   half a GPU for the trainer, half for the engine
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles.ray.cluster import num_managers
from miles.ray.rollout.engine_size import EngineSize

if TYPE_CHECKING:
    from argparse import Namespace

    from ray.util.placement_group import PlacementGroup

_PLACEMENT_TIMEOUT_SECS = 60
_HALF = 0.5


@dataclass(frozen=True)
class BundleShape:
    """`count` bundles of `num_gpus` GPUs each (0: none) and as many CPUs, but one at least. `actors` share a bundle."""

    count: int
    num_gpus: float
    actors: int = 1

    @property
    def devices(self) -> float:
        """GPUs of them all; processes where there is none."""
        return self.count * (self.num_gpus or 1)

    @property
    def resources(self) -> dict[str, float]:
        """What one bundle asks Ray for."""
        cpus = {"CPU": max(1.0, self.num_gpus)}
        return {**cpus, "GPU": float(self.num_gpus)} if self.num_gpus else cpus


@dataclass(frozen=True)
class Bundles:
    """A run of bundles in the placement group: those of the trainers, the engines, or the evaluation engines."""

    group: PlacementGroup
    offset: int
    shape: BundleShape

    @property
    def count(self) -> int:
        return self.shape.count

    def actor_options(self, index: int) -> dict[str, Any]:
        """Ray options that put actor `index` into its bundle, with its even share of it."""
        shape = self.shape
        bundle = index // shape.actors
        if not 0 <= bundle < shape.count:
            raise IndexError(f"actor {index} of {shape.count * shape.actors}")
        return {
            "num_cpus": shape.resources["CPU"] / shape.actors,
            "num_gpus": shape.num_gpus / shape.actors,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.offset + bundle
            ),
        }


@dataclass(frozen=True)
class Placement:
    """The bundles of the run, trainers first."""

    trainers: Bundles
    engines: Bundles
    eval_engines: Bundles


def create_placement(args: Namespace) -> Placement:
    """Reserve the run's bundles.

    Raises ValueError at once where the cluster can never hold them, and after a minute where others hold what is
    needed.
    """
    total = ray.cluster_resources()
    shapes = bundle_shapes(args, has_gpus=bool(total.get("GPU", 0)))
    _check_room(args, total, *shapes)
    bundles = [shape.resources for shape in shapes for _ in range(shape.count)]
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(_PLACEMENT_TIMEOUT_SECS):
        raise ValueError(
            f"no room in the Ray cluster after {_PLACEMENT_TIMEOUT_SECS} s for the bundles {bundles}: "
            f"total {total}, free {ray.available_resources()}"
        )
    offsets = accumulate((shape.count for shape in shapes), initial=0)
    return Placement(*(Bundles(group, offset, shape) for offset, shape in zip(offsets, shapes, strict=False)))


def bundle_shapes(args: Namespace, *, has_gpus: bool) -> tuple[BundleShape, BundleShape, BundleShape]:
    """Of the trainers, the engines and the engines that only evaluate."""
    nodes, ranks = int(args.actor_num_nodes), int(args.actor_num_gpus_per_node)
    engines, evals = EngineSize.from_args(args), EngineSize.of_evaluation(args)
    if not has_gpus:
        return (
            BundleShape(nodes * ranks, 0),
            BundleShape(engines.num_bundles, 0),
            BundleShape(evals.num_bundles, 0),
        )
    if getattr(args, "share_one_gpu", False):
        return BundleShape(1, _HALF), BundleShape(1, _HALF), BundleShape(0, 0)
    return (
        BundleShape(nodes, ranks, actors=ranks),
        BundleShape(engines.num_bundles, engines.gpus_per_node),
        BundleShape(evals.num_bundles, evals.gpus_per_node),
    )


def _check_room(
    args: Namespace, total: dict[str, float], trainers: BundleShape, engines: BundleShape, evals: BundleShape
) -> None:
    """Raise ValueError where the cluster or its largest node is too small."""
    has_gpus = bool(total.get("GPU", 0))
    shapes = (trainers, engines, evals)
    managers = num_managers(args)
    cpus = sum(shape.count * shape.resources["CPU"] for shape in shapes) + managers
    gpus = sum(shape.devices for shape in shapes) if has_gpus else 0
    for resource, count in {"CPU": cpus, "GPU": gpus}.items():
        if count > total.get(resource, 0):
            shared = ", or share the one GPU (--share-one-gpu)" if _could_share(args, total, trainers, engines) else ""
            raise ValueError(
                f"the run needs {count:g} {resource}s ({trainers.devices:g} for training, {engines.devices:g} for "
                f"rollout{f', {evals.devices:g} for evaluation' if evals.count else ''}"
                f"{f', {managers} for management' if resource == 'CPU' else ''}), the Ray cluster has "
                f"{total.get(resource, 0):g}: lower --actor-num-nodes, --actor-num-gpus-per-node, "
                f"--rollout-num-gpus{' or --eval-num-gpus' if evals.count else ''}, or enlarge the cluster{shared}"
            )
    if has_gpus:
        largest = max((node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
        _check_largest_node(trainers, engines, evals, largest)


def _could_share(args: Namespace, total: dict[str, float], trainers: BundleShape, engines: BundleShape) -> bool:
    alone = (total.get("GPU", 0), trainers.devices, engines.devices) == (1, 1, 1)
    return alone and getattr(args, "rollout_engine", None) == "embedded"


def _check_largest_node(trainers: BundleShape, engines: BundleShape, evals: BundleShape, largest: float) -> None:
    if trainers.num_gpus > largest:
        raise ValueError(
            f"--actor-num-gpus-per-node {trainers.num_gpus:g}: no node of the Ray cluster has more than {largest:g} "
            "GPUs. Instead: what a node has, and --actor-num-nodes for as many nodes as that takes"
        )
    wanted = max((shape.num_gpus for shape in (engines, evals) if shape.count), default=0)
    if wanted > largest:
        raise ValueError(
            f"an engine needs {wanted:g} GPUs of one node, and no node of the Ray cluster has more than {largest:g}. "
            "Instead: --num-gpus-per-node with what a node has, so that an engine spans several, or a smaller "
            "--rollout-num-gpus-per-engine or --eval-num-gpus-per-engine"
        )
