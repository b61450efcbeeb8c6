"""How many engines a run has, and how many machines and GPUs each of them takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace


@dataclass(frozen=True)
class EngineSize:
    """`count` engines, each on `nodes` machines with `gpus_per_node` GPUs (processes where there is none) of each."""

    count: int
    nodes: int
    gpus_per_node: int

    @property
    def num_bundles(self) -> int:
        """One placement bundle for each machine of each engine."""
        return self.count * self.nodes

    @staticmethod
    def of(num_gpus: int, gpus_per_engine: int, gpus_per_node: int) -> EngineSize:
        """`num_gpus` GPUs in engines of `gpus_per_engine`, on machines of `gpus_per_node`."""
        nodes = -(-gpus_per_engine // gpus_per_node)
        return EngineSize(num_gpus // gpus_per_engine, nodes, gpus_per_engine // nodes)

    @staticmethod
    def from_args(args: Namespace) -> EngineSize:
        """The engines that the run starts; external ones take no place."""
        num_gpus = 0 if getattr(args, "rollout_external", False) else int(args.rollout_num_gpus)
        return EngineSize.of(num_gpus, int(args.rollout_num_gpus_per_engine), _gpus_per_node(args))

    @staticmethod
    def of_evaluation(args: Namespace) -> EngineSize:
        """The engines that only evaluate."""
        num_gpus, per_engine = getattr(args, "eval_num_gpus", 0), getattr(args, "eval_num_gpus_per_engine", 1)
        return EngineSize.of(int(num_gpus), int(per_engine), _gpus_per_node(args))


def _gpus_per_node(args: Namespace) -> int:
    return int(getattr(args, "num_gpus_per_node", None) or 8)
