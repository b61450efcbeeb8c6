"""The losses that a mixture's routers add for themselves, as metrics.

router, each layer and micro-batch --megatron-core's tracker (of the process)--> the mean over layers and micro-batches

They are what megatron-core logs: without their coefficient, `load_balancing_loss` (1 where all experts get the same
share), `seq_load_balancing_loss` or `global_load_balancing_loss`, by --moe-router-load-balancing-type.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils

from miles.backends.megatron_utils import parallel


def take_moe_losses(num_layers: int, num_micro_batches: int) -> dict[str, float]:
    """`train/<name>` of the optimizer step that has just been made, equal on all ranks; a collective. Nothing where no
    router has such a loss.

    `num_layers`: those with experts, on all stages. `num_micro_batches`: of one data-parallel rank.
    """
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    losses = {}
    for name in sorted(tracker):
        noted = tracker[name]
        total = noted["values"].double().sum()  # over the layers of this stage, and the micro-batches
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(total, group=noted["reduce_group"])  # a rank has the part of its own tokens
        if not noted["reduce_group_has_dp"]:
            total = parallel.sum_over_data_parallel(total) / parallel_state.get_data_parallel_world_size()
        losses[f"train/{name}"] = float(total) / (num_layers * num_micro_batches)
    moe_utils.clear_aux_losses_tracker()
    return losses


def forget_moe_losses() -> None:
    """Before another model: the tracker has as many layers as the first one, and its groups."""
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
