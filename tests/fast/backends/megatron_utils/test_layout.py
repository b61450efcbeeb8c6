"""Sizes that do not fit the ranks or the model are refused, with the flag and the number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from miles.backends.megatron_utils.hf_config import HFModelConfig, parse_hf_config
from miles.backends.megatron_utils.layout import ParallelLayout
from tests.fast.backends.megatron_utils.tiny_models import CONFIGS

DENSE = parse_hf_config(CONFIGS["qwen3-deep-tied"], source="x")
EXPERTS = parse_hf_config(CONFIGS["qwen3-moe"], source="x")


@pytest.mark.parametrize(
    ("layout", "ranks", "words"),
    [
        (ParallelLayout(tensor=2, pipeline=2), 6, "6 trainer ranks are no multiple of .*2 x 2 x 1 = 4"),
        (ParallelLayout(expert=4), 6, "--expert-model-parallel-size"),
        (ParallelLayout(virtual=2), 2, "--num-virtual-stages-per-pipeline-rank 2 needs"),
    ],
)
def test_sizes_must_fit_the_ranks(layout: ParallelLayout, ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layout.check_world(ranks)


@pytest.mark.parametrize(
    ("hf", "layout", "outer", "words"),
    [
        (DENSE, ParallelLayout(tensor=8), {}, "does not divide the model's 4 attention heads"),
        (DENSE, ParallelLayout(tensor=4), {}, "does not divide the model's 2 key/value heads"),
        (replace(DENSE, intermediate_size=49), ParallelLayout(tensor=2), {}, "49 neurons"),
        (DENSE, ParallelLayout(pipeline=3), {}, "does not divide the model's 4 layers"),
        (DENSE, ParallelLayout(pipeline=2, virtual=4), {}, "gives a rank 2 layers, which do not divide among"),
        (DENSE, ParallelLayout(pipeline=2), {"first_layers": 5}, "with 5 layers on the first rank"),
        (DENSE, ParallelLayout(), {"last_layers": 1}, "need --pipeline-model-parallel-size above 1"),
        (DENSE, ParallelLayout(), {"recompute_unit": 3}, "--recompute-num-layers 3 does not divide the 4 layers"),
        (DENSE, ParallelLayout(pipeline=2, virtual=2), {"recompute_unit": 2}, "the 1 layers of a pipeline stage"),
        (DENSE, ParallelLayout(pipeline=2), {"first_layers": 1, "recompute_unit": 3}, "the 1 layers of a pipeline"),
        (DENSE, ParallelLayout(expert=2), {}, "this model has no experts"),
        (EXPERTS, ParallelLayout(expert=3), {}, "does not divide the model's 4 experts"),
        (EXPERTS, ParallelLayout(expert_tensor=5), {}, "24 neurons of an expert"),
        (EXPERTS, ParallelLayout(tensor=2), {}, "needs --sequence-parallel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sizes_must_fit_the_model(hf: HFModelConfig, layout: ParallelLayout, outer: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layout.check_model(hf, **outer)


def test_sizes_that_fit_pass() -> None:
    ParallelLayout(tensor=2, pipeline=2, virtual=2).check_model(DENSE)
    ParallelLayout(pipeline=2).check_model(DENSE, first_layers=1, last_layers=3)
    ParallelLayout(pipeline=2).check_model(DENSE, recompute_unit=2)
    ParallelLayout(pipeline=3).check_model(DENSE, last_layers=2)
    ParallelLayout(tensor=2, expert=4, sequence_parallel=True).check_model(EXPERTS)
