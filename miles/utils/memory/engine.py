"""Memory of one GPU of an inference engine: weights, and how many tokens of KV cache are left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.utils.memory.shape import Split, count_parameters
from miles.utils.memory.training import GIB, longest_sample

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.utils.memory.shape import ModelShape

ASSUMED_STATIC_FRACTION = 0.88
"""Where --sglang-mem-fraction-static is not given, SGLang chooses by GPU and chunk sizes, between 0.8 and 0.9."""
EMBEDDED_KV_SHARE = 0.6
"""Of what is free once the weights are there (miles.backends.embedded_engine.memory)."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one GPU, and tokens of one engine."""

    weights: int
    """With the embedded engine twice the model: an update is staged beside the weights in use."""
    kv_bytes_per_token: int
    """On one GPU."""
    kv_bytes: float
    """What is left for the KV cache; not positive where the weights leave nothing."""
    limit: float
    """Weights and KV cache together: the static fraction of the GPU."""
    longest: int
    """Tokens of the longest sample."""

    @property
    def kv_tokens(self) -> int:
        return max(0, int(self.kv_bytes // self.kv_bytes_per_token))

    @property
    def longest_at_once(self) -> float:
        """Longest samples that fit side by side."""
        return self.kv_tokens / self.longest

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= self.longest


def engine_memory(args: Namespace, shape: ModelShape, gpu_gib: float) -> EngineMemory:
    """KV cache: 2 L k d values a token (keys and values, k KV heads of size d, L layers), split over tensor-parallel
    ranks as far as there are heads. SGLang: weights and KV cache together take --sglang-mem-fraction-static of the GPU.

    Raises ValueError where the ranks do not divide the attention heads.
    """
    embedded = getattr(args, "rollout_engine", None) == "embedded"
    ranks = int(getattr(args, "rollout_num_gpus_per_engine", None) or 1)
    if shape.heads % ranks:
        raise ValueError(f"--rollout-num-gpus-per-engine {ranks} does not divide the {shape.heads} attention heads")
    itemsize = 4 if embedded and getattr(args, "embedded_dtype", "float32") == "float32" else 2
    count = count_parameters(shape, split=Split(tensor=ranks, expert_tensor=ranks))
    weights = count.total * itemsize * (2 if embedded else 1)
    kv_itemsize = 1 if str(getattr(args, "sglang_kv_cache_dtype", None)).startswith("fp8") else itemsize
    kv_heads = -(-shape.kv_heads // ranks)
    gpu = gpu_gib * GIB
    if embedded:
        left = EMBEDDED_KV_SHARE * (gpu - weights)
        limit = weights + left
    else:
        limit = (getattr(args, "sglang_mem_fraction_static", None) or ASSUMED_STATIC_FRACTION) * gpu
        left = limit - weights
    return EngineMemory(
        weights=weights,
        kv_bytes_per_token=2 * shape.layers * kv_heads * shape.head_dim * kv_itemsize,
        kv_bytes=left,
        limit=limit,
        longest=longest_sample(args, shape),
    )
