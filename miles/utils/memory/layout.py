"""Which part of the model each trainer rank holds, from the parallelism flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from miles.utils.memory.shape import Split
from miles.utils.parallel_sizes import ParallelSizes, uneven_pipeline

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.utils.memory.shape import ModelShape


@dataclass(frozen=True)
class Layout(ParallelSizes):
    """Sizes of the parallel dimensions, and of what they are made of."""

    world: int = field(kw_only=True)
    """Trainer ranks."""
    first_layers: int | None = None
    """Layers of the first stage; None: as many as the others."""
    last_layers: int | None = None

    @staticmethod
    def of_run(args: Namespace, shape: ModelShape) -> Layout:
        """Raises ValueError naming the flag that does not divide."""
        nodes, ranks = getattr(args, "actor_num_nodes", None), getattr(args, "actor_num_gpus_per_node", None)
        world = (1 if nodes is None else nodes) * (1 if ranks is None else ranks)
        layout = Layout(world=world, **{**ParallelSizes.fields_from(args), **uneven_pipeline(args)})
        layout.check(shape)
        return layout

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError where the sizes do not divide what they split."""
        self.check_world(self.world)
        if shape.experts is not None and shape.experts.number % self.expert:
            raise ValueError(
                f"--expert-model-parallel-size {self.expert} does not divide the {shape.experts.number} experts"
            )
        for what, heads in (("attention", shape.heads), ("key/value", shape.kv_heads)):
            if heads % self.tensor:
                raise ValueError(f"--tensor-model-parallel-size {self.tensor} does not divide the {heads} {what} heads")
        self.stage_layers(shape)

    @property
    def split(self) -> Split:
        return Split(self.tensor, self.expert, self.expert_tensor)

    @property
    def data(self) -> int:
        """Ranks that get different samples."""
        return self.data_size(self.world)

    @property
    def dense_copies(self) -> int:
        """Ranks that hold the same dense parameters: what a distributed optimizer spreads their states over."""
        return self.data * self.context

    @property
    def expert_copies(self) -> int:
        return max(1, self.world // (self.expert_tensor * self.expert * self.pipeline))

    def stage_layers(self, shape: ModelShape) -> list[int]:
        """Layers of each pipeline stage. Raises ValueError where they do not come out even."""
        ends = [n for n in (self.first_layers, self.last_layers) if n is not None]
        others = self.pipeline - len(ends)
        rest = shape.layers - sum(ends)
        if others < 0 or (others == 0 and rest) or (others and (rest <= 0 or rest % others)):
            raise ValueError(
                f"--pipeline-model-parallel-size {self.pipeline} does not divide the {shape.layers} layers; "
                "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers set those of the ends"
            )
        layers = [rest // others] * others if others else []
        layers = [self.first_layers, *layers] if self.first_layers is not None else layers
        return [*layers, self.last_layers] if self.last_layers is not None else layers

    def micro_batches_in_flight(self, stage: int) -> float:
        """Micro-batches whose activations a stage holds at once, in units of all of its layers.

        1F1B: pipeline - stage. Interleaved with v stages a rank, the first rank holds 1 + (p - 1) / (p v) times as much
        (Narayanan et al., arXiv:2104.04473, section 2.2; Korthikanti et al., arXiv:2205.05198, section 4.2.3).
        """
        in_flight = float(self.pipeline - stage)
        if self.virtual > 1:
            in_flight *= 1 + (self.pipeline - 1) / (self.pipeline * self.virtual)
        return in_flight
