"""Which sizes of the parallel dimensions fit a number of ranks and a model. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.utils.parallel_sizes import ParallelSizes, uneven_pipeline

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.backends.megatron_utils.hf_config import HFModelConfig


@dataclass(frozen=True)
class ParallelLayout(ParallelSizes):
    """The sizes, and whether they fit a number of ranks and a model."""

    @staticmethod
    def from_args(args: Namespace, world_size: int) -> ParallelLayout:
        """Raises ValueError where the sizes do not divide `world_size`, or this machine cannot run a dimension."""
        layout = ParallelLayout(**ParallelSizes.fields_from(args))
        layout.check_world(world_size)
        return layout

    @property
    def micro_batch_multiple(self) -> int:
        """Micro-batches of a step must be a multiple of this: the interleaved schedule works on groups of them."""
        return self.pipeline if self.virtual > 1 else 1

    def check_model(
        self,
        hf: HFModelConfig,
        *,
        first_layers: int | None = None,
        last_layers: int | None = None,
        recompute_unit: int | None = None,
    ) -> None:
        """Raise ValueError where the model cannot be split like this. `first_layers`, `last_layers`: of the first and
        the last pipeline rank, where they differ from the others'; `recompute_unit`: every stage is made of such
        pieces, which are recomputed as one."""
        self._check_tensor(hf)
        for layers in self._check_pipeline(hf.num_layers, first_layers, last_layers):
            stage = layers // self.virtual
            if recompute_unit is not None and stage % recompute_unit:
                raise ValueError(
                    f"--recompute-num-layers {recompute_unit} does not divide the {stage} layers of a pipeline stage, "
                    "as --recompute-method uniform needs"
                )
        self._check_experts(hf)

    def _check_tensor(self, hf: HFModelConfig) -> None:
        for what, size in (
            ("attention heads", hf.num_heads),
            ("key/value heads", hf.num_kv_heads),
            ("neurons of a feed-forward layer", hf.intermediate_size if hf.moe is None else self.tensor),
        ):
            if size % self.tensor:
                raise ValueError(
                    f"--tensor-model-parallel-size {self.tensor} does not divide the model's {size} {what}"
                )

    def _check_pipeline(self, layers: int, first: int | None, last: int | None) -> list[int]:
        """The layers of the pipeline ranks, each number once."""
        ranks = self.pipeline - (first is not None) - (last is not None)
        middle = layers - (first or 0) - (last or 0)
        flags = f"--pipeline-model-parallel-size {self.pipeline}"
        if (first is not None or last is not None) and self.pipeline == 1:
            raise ValueError(
                "--decoder-first-pipeline-num-layers and -last- need --pipeline-model-parallel-size above 1"
            )
        if middle < 0 or (ranks and middle % ranks) or (not ranks and middle):
            split = f" with {first} layers on the first rank" if first is not None else ""
            split += f" with {last} layers on the last rank" if last is not None else ""
            raise ValueError(f"{flags}{split} does not divide the model's {layers} layers evenly among the other ranks")
        parts = [part for part in (first, last, middle // ranks if ranks else None) if part is not None]
        for part in parts:
            if part < 1 or part % self.virtual:
                raise ValueError(
                    f"{flags} gives a rank {part} layers, which do not divide among "
                    f"--num-virtual-stages-per-pipeline-rank {self.virtual}"
                )
        return parts

    def _check_experts(self, hf: HFModelConfig) -> None:
        if hf.moe is None:
            if self.expert > 1:
                raise ValueError(f"--expert-model-parallel-size {self.expert}: this model has no experts")
            return
        if hf.moe.num_experts % self.expert:
            raise ValueError(
                f"--expert-model-parallel-size {self.expert} does not divide the model's {hf.moe.num_experts} experts"
            )
        if hf.moe.intermediate_size % self.expert_tensor:
            raise ValueError(
                f"--expert-tensor-parallel-size {self.expert_tensor} does not divide the {hf.moe.intermediate_size} "
                "neurons of an expert"
            )
        if self.tensor > 1 and not self.sequence_parallel:
            raise ValueError(
                f"--tensor-model-parallel-size {self.tensor} with experts needs --sequence-parallel: else every rank "
                "would send all tokens to them"
            )


def layers_from(args: Namespace) -> dict[str, int | None]:
    """What `check_model` must know about layers, from the flags."""
    whole = getattr(args, "recompute_granularity", None) == "full"
    uniform = whole and getattr(args, "recompute_method", None) == "uniform"
    return {**uneven_pipeline(args), "recompute_unit": args.recompute_num_layers if uniform else None}
