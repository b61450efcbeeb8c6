"""Causal attention over packed sequences for megatron-core's local layer spec, on PyTorch's fused attention kernel.

    packed [T, heads, dim] --gather--> [sequences, longest, heads, dim] --attention--> --scatter--> [T, heads * dim]

Sequences are padded on the right. With a causal mask no real token attends to a pad, so the result is exact, and the
pads' gradients are zero. Sequences of very different lengths go through in groups of similar length, so that padding
costs at most a bounded share of the work.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker

if TYPE_CHECKING:
    from miles.backends.megatron_utils.context_parallel import ContextShard

_MAX_PADDED_SHARE = 1.5
"""A group's padded size over its tokens; a group that would exceed it is split."""
_SMALL_GROUP_TOKENS = 8192
"""Groups below this padded size are not split: another kernel call costs more than the padding."""


@dataclass(frozen=True)
class AttentionGroup:
    """Sequences that go through the attention kernel together."""

    num_sequences: int
    longest: int
    gather: torch.Tensor
    """[num_sequences * longest] int64: the packed position of each padded slot (pads repeat the last token)."""


@dataclass(frozen=True)
class AttentionLayout:
    """How the sequences of one packed micro-batch are laid out for the kernel; built once, used by every layer."""

    groups: tuple[AttentionGroup, ...]
    scatter: torch.Tensor
    """[T] int64: for each packed position its slot in the concatenated padded outputs of the groups."""


@dataclass
class PackedBatchParams(PackedSeqParams):
    """megatron-core's description of a packed batch, with the layout that `PackedAttention` uses."""

    layout: AttentionLayout | None = None
    context: ContextShard | None = None
    """What of the row this rank has; None: all of it."""


def packed_params(
    cu_seqlens: torch.Tensor, lengths: list[int], *, with_layout: bool, context: ContextShard | None = None
) -> PackedBatchParams:
    """Describe sequences of `lengths` packed one after the other; `cu_seqlens` is [sequences + 1] int32."""
    longest = max(lengths)
    return PackedBatchParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        layout=plan_layout(lengths, device=cu_seqlens.device) if with_layout else None,
        context=context,
    )


def plan_layout(lengths: list[int], *, device: torch.device) -> AttentionLayout:
    """Group sequences by length; the cost is one small tensor per group, not one per sequence."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    starts = torch.cumsum(sizes, 0) - sizes
    scatter = torch.empty(int(sizes.sum()), dtype=torch.int64)
    groups = []
    offset = 0
    for members in _group_by_length(lengths):
        index = torch.tensor(members, dtype=torch.int64)
        longest = int(sizes[index].max())
        within = torch.arange(longest)
        real = within[None, :] < sizes[index][:, None]
        position = starts[index][:, None] + torch.minimum(within[None, :], sizes[index][:, None] - 1)
        slots = torch.arange(offset, offset + len(members) * longest).view(len(members), longest)
        scatter[position[real]] = slots[real]
        groups.append(AttentionGroup(len(members), longest, position.reshape(-1).to(device)))
        offset += len(members) * longest
    return AttentionLayout(tuple(groups), scatter.to(device))


def _group_by_length(lengths: list[int]) -> list[list[int]]:
    """Indices of sequences, longest first, cut where padding to the group's longest would cost too much.

    >>> _group_by_length([3, 3, 2])
    [[0, 1, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = [[]]
    tokens = 0
    for i in order:
        longest = lengths[groups[-1][0]] if groups[-1] else lengths[i]
        padded = longest * (len(groups[-1]) + 1)
        if groups[-1] and padded > _SMALL_GROUP_TOKENS and padded > _MAX_PADDED_SHARE * (tokens + lengths[i]):
            groups.append([])
            tokens = 0
        groups[-1].append(i)
        tokens += lengths[i]
    return groups


class PackedAttention(torch.nn.Module):
    """The `core_attention` of the local spec: causal, grouped-query, for packed (`thd`) and padded (`bshd`) inputs."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()
        self._scale = config.softmax_scale
        self._dropout = config.attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """query [T, heads, dim] (packed) or [S, B, heads, dim]; key and value with the number of KV heads.

        Returns [T, heads * dim] (packed) or [S, B, heads * dim].
        """
        if packed_seq_params is None:
            out = self._attend(*(t.permute(1, 2, 0, 3) for t in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        context = packed_seq_params.context  # type: ignore[attr-defined]
        if context is None:
            return self._attend_row(packed_seq_params, query, key, value)
        # Every rank attends for the whole row: simple and exact, and what a rank saves is all but the attention.
        heads = [query.shape[1], key.shape[1], value.shape[1]]
        whole = context.whole(torch.cat([query, key, value], dim=1)).split(heads, dim=1)
        return self._attend_row(packed_seq_params, *whole).index_select(0, context.positions)

    def _attend_row(self, params: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Returns [T, heads * dim]."""
        layout = params.layout
        outputs = [self._attend_group(group, query, key, value) for group in layout.groups]
        padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return padded.index_select(0, layout.scatter)

    def _attend_group(self, group: AttentionGroup, *packed: torch.Tensor) -> torch.Tensor:
        """Returns [num_sequences * longest, heads * dim]."""
        shape = (group.num_sequences, group.longest)
        inputs = (t.index_select(0, group.gather).view(*shape, *t.shape[1:]).transpose(1, 2) for t in packed)
        return self._attend(*inputs).transpose(1, 2).reshape(shape[0] * shape[1], -1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """All [B, heads, S, dim]."""
        dropout = self._dropout if self.training else 0.0
        # Ranks that share a layer must drop different entries: megatron-core keeps a generator for that.
        with get_cuda_rng_tracker().fork() if dropout else nullcontext():
            return torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=True,
                scale=self._scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
