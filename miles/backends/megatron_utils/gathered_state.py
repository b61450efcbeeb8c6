"""Weights and optimizer state of the whole model, shared out among the ranks that write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles.backends.megatron_utils.checkpoint_files import MODEL, OPTIMIZER
from miles.backends.megatron_utils.gather import collect
from miles.backends.megatron_utils.optimizer_state import OptimizerState
from miles.backends.megatron_utils.weights import local_params

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miles.backends.megatron_utils.checkpoint import TrainingState
    from miles.backends.megatron_utils.hf_config import HFModelConfig

_BUCKET_BYTES = 512 * 1024**2


class GatheredState:
    """All tensors of a checkpoint. Making it and iterating its stream are collectives of all ranks."""

    def __init__(self, state: TrainingState, hf: HFModelConfig, *, with_optimizer: bool) -> None:
        self._plan = state.plan
        self._hf = hf
        self._weights = {
            local.spec.hf_names: local.parameter.detach()
            for local in local_params(state.stages, hf)
            if not local.is_copy
        }
        self._optimizer = OptimizerState(state.optimizer, state.stages, hf)
        self._fields = self._optimizer.fields() if with_optimizer else {}
        self.scalars = self._optimizer.scalars() if with_optimizer else {}
        """Scalar state of the whole model, on every rank."""

    def stream(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(MODEL or OPTIMIZER, name, full tensor) of what this rank writes, weights first; every rank iterates it to
        the end."""
        for writer in self._plan.writers:
            for bucket in self._plan.of_writer(writer).buckets(_BUCKET_BYTES):
                for name, tensor in collect(bucket, self._weights, self._hf, target=writer):
                    yield MODEL, name, tensor
        for field, parameters in self._fields.items():
            plan = self._plan.only(parameters)
            for writer in plan.writers:
                for bucket in plan.of_writer(writer).buckets(_BUCKET_BYTES, torch.float32):
                    wholes = self._optimizer.wholes(bucket, field)
                    for name, tensor in collect(bucket, wholes, self._hf, target=writer, dtype=torch.float32):
                        yield OPTIMIZER, f"{name}|{field}", tensor
