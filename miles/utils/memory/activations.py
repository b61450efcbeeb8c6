"""What a forward pass keeps for the backward pass, in bytes.

Counted tensor by tensor, after Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198, section 4), for layers as they are here: no dropout, RMSNorm, gated MLP, rotary embedding, and an
attention kernel that keeps no matrix of scores (FlashAttention, arXiv:2205.14135), in bf16 or fp32. Estimates, not
exact: kernels differ in what they keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles.utils.memory.layout import Layout
    from miles.utils.memory.shape import ModelShape


@dataclass(frozen=True)
class Recomputation:
    """Which layers keep their input alone, and are computed again in the backward pass."""

    granularity: str | None = None
    """full, selective or None. Selective recomputes the attention kernel, which keeps next to nothing anyway."""
    method: str | None = None
    num_layers: int = 1

    def kept(self, layers: int) -> tuple[int, int, int]:
        """(layers kept whole, layer inputs kept, layers at hand while they are recomputed) of a stage.

        uniform: every `num_layers` layers are one piece, of which the input is kept. block: the first `num_layers`
        layers of the stage, one by one; the others are kept whole.
        """
        if self.granularity != "full":
            return layers, 0, 0
        size = max(1, min(self.num_layers, layers))
        if self.method == "block":
            return layers - size, size, 1
        return 0, -(-layers // size), size


def layer_bytes(shape: ModelShape, layout: Layout, itemsize: int) -> float:
    """Activations of one layer for one token, on one rank."""
    t = layout.tensor
    s = t if layout.sequence_parallel else 1  # sequence parallelism splits what tensor parallelism leaves whole
    h, d = shape.hidden, shape.head_dim
    around = 4 * h / s  # inputs and outputs of the two norms
    queries_and_keys = (shape.heads + shape.kv_heads) * d
    attention = (shape.heads + 2 * shape.kv_heads) * d  # the projection's output, of which the values are kept
    attention += queries_and_keys  # with the rotary embedding
    attention += queries_and_keys if shape.qk_norm else 0
    attention += shape.heads * d  # the attention's output
    log_sum_exp = 4 * shape.heads / t
    if shape.experts is None:
        mlp, router = 4 * shape.ffn / t, 0.0  # gate and up; gate behind SiLU; their product
    else:
        k, width = shape.experts.top_k, shape.experts.ffn
        mlp = 3 * k * h / s + 4 * k * width / layout.expert_tensor  # dispatched, permuted, returned; as in a dense one
        router = 2 * 4 * shape.experts.number / s  # logits and probabilities in fp32
    return itemsize * (around + attention / t + mlp) + log_sum_exp + router


def stage_bytes(
    shape: ModelShape, layout: Layout, recomputation: Recomputation, *, stage: int, tokens: int, itemsize: int
) -> float:
    """Peak activations of the layers of one stage. `tokens`: of one micro-batch on one rank."""
    layers = layout.stage_layers(shape)[stage]
    whole, inputs, at_hand = recomputation.kept(layers)
    a_layer = layer_bytes(shape, layout, itemsize)
    an_input = itemsize * shape.hidden / (layout.tensor if layout.sequence_parallel else 1)
    in_flight = layout.micro_batches_in_flight(stage)
    return tokens * (in_flight * (whole * a_layer + inputs * an_input) + at_hand * a_layer)


_CHUNK_BYTES = 2 * 128 * 1024**2


def logits_bytes(shape: ModelShape, layout: Layout, *, tokens: int, itemsize: int) -> float:
    """The last stage's logits of one micro-batch: as computed, as fp32, and the fp32 gradient.

    The log-probabilities keep nothing else of that size and work in chunks (miles.backends.training_utils.log_probs).
    """
    copies = 4 + 4 + (itemsize if itemsize != 4 else 0)
    return tokens * shape.vocab / layout.tensor * copies + _CHUNK_BYTES
