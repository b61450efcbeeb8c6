"""Memory of one trainer rank: weights, gradients and optimizer states exactly, activations as an estimate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.utils.memory.activations import Recomputation, logits_bytes, stage_bytes
from miles.utils.memory.layout import Layout
from miles.utils.memory.shape import ParameterCount, count_parameters

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.utils.memory.shape import ModelShape

GIB = 1024**3
RESERVE_BYTES = 3 * GIB
"""CUDA context, libraries' workspaces, NCCL's buffers, what the allocator cannot use: an allowance, not a formula."""
ASSUMED_PROMPT_TOKENS = 2048
"""Where no flag bounds a prompt."""


@dataclass(frozen=True)
class TrainingConfig:
    """What of the flags decides about memory."""

    layout: Layout
    bf16: bool
    optimizer: str
    distributed_optimizer: bool
    cpu_offload: bool
    has_reference: bool
    """A frozen copy of the model for KL terms."""
    recomputation: Recomputation
    tokens: int
    """Of one micro-batch on one rank."""
    update_bytes: int
    """What a weight update takes beside the model, on rank 0."""

    @staticmethod
    def from_args(args: Namespace, shape: ModelShape) -> TrainingConfig:
        """Raises ValueError naming the flag that does not fit."""
        layout = Layout.of_run(args, shape)
        return TrainingConfig(
            layout=layout,
            bf16=bool(getattr(args, "bf16", False)),
            optimizer=getattr(args, "optimizer", None) or "adam",
            distributed_optimizer=bool(getattr(args, "use_distributed_optimizer", False)),
            cpu_offload=bool(getattr(args, "optimizer_cpu_offload", False)),
            has_reference=bool(getattr(args, "use_kl_loss", False)) or bool(getattr(args, "kl_coef", None)),
            recomputation=Recomputation(
                getattr(args, "recompute_granularity", None),
                getattr(args, "recompute_method", None),
                getattr(args, "recompute_num_layers", None) or 1,
            ),
            tokens=micro_batch_tokens(args, shape, layout.context),
            update_bytes=2 * update_bucket_bytes(args),
        )

    @property
    def itemsize(self) -> int:
        return 2 if self.bf16 else 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of a pipeline stage."""

    stage: int
    parameters: ParameterCount
    weights: int
    gradients: int
    optimizer: int
    """On the GPU."""
    reference: int
    activations: float
    logits: float
    update: int
    host: int
    """In the machine's memory: an offloaded optimizer."""

    @property
    def least(self) -> int:
        """What is there throughout a run, whatever the batches: a lower bound."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> float:
        """Activations and weight updates come in turn."""
        return self.least + max(self.activations + self.logits, self.update) + RESERVE_BYTES


def update_bucket_bytes(args: Namespace) -> int:
    """Of weights on their way to engines."""
    return getattr(args, "update_weight_buffer_size", None) or 512 * 1024**2


def longest_sample(args: Namespace, shape: ModelShape) -> int:
    """Tokens of the longest sample that the flags allow."""
    context = getattr(args, "rollout_max_context_len", None) or shape.max_positions
    response = getattr(args, "rollout_max_response_len", None)
    if response is None:
        return int(context)
    prompt = getattr(args, "rollout_max_prompt_len", None) or ASSUMED_PROMPT_TOKENS
    return int(min(context, prompt + response))


def micro_batch_tokens(args: Namespace, shape: ModelShape, context_parallel: int) -> int:
    """Most tokens of a micro-batch on one rank: --max-tokens-per-gpu, or one longest sample where that is more."""
    longest = -(-longest_sample(args, shape) // context_parallel)
    if getattr(args, "use_dynamic_batch_size", False) and getattr(args, "max_tokens_per_gpu", None):
        return max(int(args.max_tokens_per_gpu), longest)
    return longest * int(getattr(args, "micro_batch_size", None) or 1)


def rank_memory(shape: ModelShape, config: TrainingConfig, stage: int) -> RankMemory:
    """One rank of a pipeline stage. Bytes for each parameter (Rajbhandari et al., arXiv:1910.02054, section 3.1, with
    megatron-core's fp32 gradients):

                                     bf16                       fp32
        weights                      2                          4
        gradient buffer              4                          4
        Adam                         4 main + 4 + 4             4 + 4
        SGD with momentum            4 main + 4                 4

    A distributed optimizer divides the optimizer's part by the number of ranks with the same parameters. Offloaded, it
    lies in the machine's memory, with fp32 weights and gradients: 16 bytes for each parameter with Adam
    (megatron.core.optimizer.cpu_offloading.HybridDeviceOptimizer).
    """
    layout, itemsize = config.layout, config.itemsize
    count = count_parameters(
        shape,
        split=layout.split,
        layers=layout.stage_layers(shape)[stage],
        first=stage == 0,
        last=stage == layout.pipeline - 1,
    )
    moments = 8 if config.optimizer == "adam" else 4
    per_parameter = moments + (4 if config.bf16 or config.cpu_offload else 0)
    states = per_parameter * count.total
    if config.distributed_optimizer:
        states = -(-per_parameter * count.dense // layout.dense_copies)
        states += -(-per_parameter * count.expert // layout.expert_copies)
    is_last = stage == layout.pipeline - 1
    return RankMemory(
        stage=stage,
        parameters=count,
        weights=itemsize * count.total,
        gradients=4 * count.total,
        optimizer=0 if config.cpu_offload else states,
        reference=itemsize * count.total if config.has_reference else 0,
        activations=stage_bytes(
            shape, layout, config.recomputation, stage=stage, tokens=config.tokens, itemsize=itemsize
        ),
        logits=logits_bytes(shape, layout, tokens=config.tokens, itemsize=itemsize) if is_last else 0.0,
        update=config.update_bytes if stage == 0 else 0,
        host=states + states // per_parameter * 4 if config.cpu_offload else 0,
    )


def all_stages(shape: ModelShape, config: TrainingConfig) -> list[RankMemory]:
    """One rank of each pipeline stage."""
    return [rank_memory(shape, config, stage) for stage in range(config.layout.pipeline)]
