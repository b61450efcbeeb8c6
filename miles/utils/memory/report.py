"""The estimate of a run as a whole: as a table, and as the sentence that says why it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.utils.memory.engine import EngineMemory, engine_memory
from miles.utils.memory.remedies import effective, for_engine, for_training, sentence
from miles.utils.memory.shape import ModelShape, count_parameters
from miles.utils.memory.training import GIB, RESERVE_BYTES, RankMemory, TrainingConfig, all_stages

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from miles.utils.memory.remedies import Remedy


@dataclass(frozen=True)
class Estimate:
    """See the module docstring."""

    args: Namespace
    shape: ModelShape
    training: TrainingConfig
    stages: list[RankMemory]
    engine: EngineMemory
    gpu_gib: float

    @staticmethod
    def from_args(args: Namespace, shape: ModelShape, gpu_gib: float) -> Estimate:
        """Raises ValueError naming the flag that does not fit the model."""
        training = TrainingConfig.from_args(args, shape)
        return Estimate(
            args, shape, training, all_stages(shape, training), engine_memory(args, shape, gpu_gib), gpu_gib
        )

    @property
    def largest(self) -> RankMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.total)

    def problems(self) -> list[str]:
        """A sentence for each reason why it is not expected to fit; empty where it is."""
        found = []
        if (rank := self.largest).total > self.gpu_gib * GIB:
            found.append(
                f"training needs about {_gib(rank.total)} on a GPU of {self.gpu_gib:g} GiB (pipeline stage "
                f"{rank.stage}; most of it: {_largest_part(rank)}). "
                + sentence(self.training_remedies(_part_names(rank)[0], lambda stage: stage.total))
            )
        if not self.engine.fits:
            found.append(
                f"an engine's GPU of {self.gpu_gib:g} GiB holds {_gib(self.engine.weights)} of weights and then "
                f"{self.engine.kv_tokens} tokens of KV cache, but one sample may have {self.engine.longest}. "
                + sentence(self.engine_remedies())
            )
        return found

    def training_remedies(self, part: str, measure: Callable[[RankMemory], float]) -> list[Remedy]:
        """What makes the largest `measure` of a stage smaller, where `part` of it is the largest."""

        def largest(args: Namespace) -> float:
            return max(map(measure, all_stages(self.shape, TrainingConfig.from_args(args, self.shape))))

        return effective(for_training(self.args, self.shape, part), self.args, largest)

    def engine_remedies(self) -> list[Remedy]:
        """What makes smaller what an engine lacks for one sample."""

        def missing(args: Namespace) -> float:
            engine = engine_memory(args, self.shape, self.gpu_gib)
            return engine.longest * engine.kv_bytes_per_token - engine.kv_bytes

        return effective(for_engine(self.args, self.shape), self.args, missing)

    @property
    def host_bytes(self) -> int:
        """Of an offloaded optimizer, over all trainer ranks."""
        ranks_of_a_stage = self.training.layout.world // self.training.layout.pipeline
        return sum(rank.host for rank in self.stages) * ranks_of_a_stage

    def host_problems(self, memory: int) -> list[str]:
        """The same for the `memory`, in bytes, of one machine that has all trainer ranks."""
        if self.host_bytes <= memory:
            return []
        spread = "" if self.training.distributed_optimizer else "--use-distributed-optimizer on "
        return [
            f"the offloaded optimizer takes {_gib(self.host_bytes)} of host memory, and this machine has "
            f"{_gib(memory)}. Instead: {spread}more GPUs, without --optimizer-cpu-offload"
        ]

    def impossible(self) -> str | None:
        """Why the run cannot fit whatever the batches are; None where it may."""
        rank = max(self.stages, key=lambda stage: stage.least)
        if rank.least <= self.gpu_gib * GIB:
            return None
        return (
            f"weights, gradients and optimizer states alone take {_gib(rank.least)} on a GPU of {self.gpu_gib:g} GiB "
            f"(pipeline stage {rank.stage}; most of it: {_largest_part(rank)}). "
            + sentence(self.training_remedies(_part_names(rank, _LASTING)[0], lambda stage: stage.least))
        )

    def table(self) -> str:
        """Lines for a terminal."""
        return "\n".join([*self._training_lines(), "", *self._engine_lines()])

    def _training_lines(self) -> Iterator[str]:
        layout, total = self.training.layout, count_parameters(self.shape).total
        yield f"{total / 1e9:.2f} B parameters; {self.gpu_gib:g} GiB a GPU"
        yield ""
        yield (
            f"training: {layout.world} GPUs = data {layout.data} x tensor {layout.tensor} x pipeline "
            f"{layout.pipeline} x context {layout.context}; expert {layout.expert}; "
            f"micro-batches of {self.training.tokens:,} tokens a GPU"
        )
        columns = [f"stage {rank.stage}" for rank in self.stages]
        yield f"{'GiB a GPU':<28}" + "".join(f"{name:>12}" for name in columns)
        rows = {
            "parameters (billions)": [rank.parameters.total / 1e9 for rank in self.stages],
            **{name: [_part(rank, name) / GIB for rank in self.stages] for name in _PARTS},
            "reserve": [RESERVE_BYTES / GIB for _ in self.stages],
            "total (largest at a time)": [rank.total / GIB for rank in self.stages],
        }
        for name, values in rows.items():
            yield f"{name:<28}" + "".join(f"{value:>12.2f}" for value in values)
        if any(rank.host for rank in self.stages):
            hosts = "".join(f"{rank.host / GIB:>12.2f}" for rank in self.stages)
            yield f"{'host memory, GiB a rank':<28}{hosts}"
            yield f"{'host memory, GiB in all':<28}{self.host_bytes / GIB:>12.2f}"

    def _engine_lines(self) -> Iterator[str]:
        engine = self.engine
        yield "engine, GiB a GPU"
        yield f"{'weights':<28}{engine.weights / GIB:>12.2f}"
        yield f"{'KV cache':<28}{max(0.0, engine.kv_bytes) / GIB:>12.2f}"
        yield f"{'limit for both':<28}{engine.limit / GIB:>12.2f}"
        yield (
            f"{engine.kv_tokens:,} tokens of KV cache: {engine.longest_at_once:.1f} samples of {engine.longest:,} "
            "tokens at a time"
        )


_PARTS = ("weights", "gradients", "optimizer", "reference", "activations", "logits", "update")
_LASTING = ("weights", "gradients", "optimizer", "reference")
"""What is there whatever the batches are."""


def _part(rank: RankMemory, name: str) -> float:
    return float(getattr(rank, name))


def _part_names(rank: RankMemory, among: tuple[str, ...] = _PARTS) -> list[str]:
    """The largest one first."""
    return sorted(among, key=lambda name: -_part(rank, name))


def _largest_part(rank: RankMemory) -> str:
    name = _part_names(rank)[0]
    return f"{name}, {_gib(_part(rank, name))}"


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"
