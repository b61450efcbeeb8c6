"""Where each token of one forward pass comes from, where its keys and values go, and what it attends to.

One pass computes one packed row of tokens:

    [ one token for each running request, in row order, class by class | prompt tokens of the joining requests ]
      attends to its row of the KV cache                                 attends to its own prompt, causally

A joining request's last token is already among the first part: only the tokens before it are "prompt tokens" here, and
they need no logits. So every running request gets exactly one new token from every pass. Joining requests with the same
prompt share its computation: the keys and values are written to each one's row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from miles.backends.embedded_engine.kv_cache import KVCache, LengthClass
    from miles.backends.embedded_engine.request import Request


@dataclass(frozen=True)
class DecodeSlice:
    """The running requests of one length class: tokens [start, start + rows) of the pass."""

    pool: LengthClass
    start: int
    rows: int
    longest: int
    """Positions 0 .. longest-1 are attended to."""
    write_at: torch.Tensor
    """[rows * kv_heads] int64: where in the class's flat per-layer view each token's keys and values go."""
    mask: torch.Tensor
    """[rows * kv_heads, 1, longest], 0 or -inf, in the model's dtype."""


@dataclass(frozen=True)
class PromptWrite:
    """Keys and values of prompt tokens that go to one length class."""

    pool: LengthClass
    tokens: torch.Tensor
    """[t] int64, index into the pass; a shared prompt occurs once for each request that has it."""
    write_at: torch.Tensor
    """[t * kv_heads] int64."""


@dataclass(frozen=True)
class PromptBlock:
    """Prompts of similar length, computed as one causal [count, longest] block, padded at the right."""

    count: int
    longest: int
    start: int
    stop: int
    """The prompts' tokens in the pass."""
    gather: torch.Tensor | None
    """[count * longest] int64: the token in each place of the block (padding repeats one); None = all equally long."""
    valid: torch.Tensor | None
    """[stop - start] int64: the place in the block of each token; None = all equally long."""


@dataclass
class StepPlan:
    """One forward pass. `requests[i]` gets the token sampled from logits row i."""

    requests: list[Request]
    input_ids: torch.Tensor
    """[1, tokens] int64."""
    position_ids: torch.Tensor
    """[1, tokens] int64."""
    decode: list[DecodeSlice]
    writes: list[PromptWrite] = field(default_factory=list)
    blocks: list[PromptBlock] = field(default_factory=list)
    scored: list[tuple[Request, int, int]] = field(default_factory=list)
    """Joining requests that want input log-probs: (request, first prompt token in the pass, how many)."""

    @property
    def logits_rows(self) -> int:
        """Tokens of the pass, counted from the first, that need logits."""
        return len(self.requests) if not self.scored else int(self.input_ids.shape[1])


class _Prompt:
    """A distinct prompt and the joining requests that have it."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.requests: list[Request] = []


def plan_step(cache: KVCache, joining: list[Request], *, kv_heads: int, dtype: torch.dtype) -> StepPlan:
    """The next pass over all requests in `cache` (which must be compact); `joining` are those whose prompt is new."""
    device = cache.classes[0].data.device
    requests: list[Request] = []
    ids: list[int] = []
    positions: list[int] = []
    decode: list[DecodeSlice] = []
    heads = np.arange(kv_heads)
    for pool in cache.classes:
        rows = pool.requests
        if not rows:
            continue
        lengths = [r.num_tokens for r in rows]
        at = np.array(lengths) - 1
        write_at = (np.arange(len(rows))[:, None] * kv_heads + heads) * pool.length + at[:, None]
        longest = int(at.max()) + 1
        decode.append(
            DecodeSlice(
                pool=pool,
                start=len(requests),
                rows=len(rows),
                longest=longest,
                write_at=torch.from_numpy(write_at.reshape(-1)).to(device),
                mask=_decode_mask(at, longest, kv_heads, dtype).to(device),
            )
        )
        requests.extend(rows)
        ids.extend([r.last_token for r in rows])
        positions.extend(at.tolist())
    plan = StepPlan(requests, torch.empty(0), torch.empty(0), decode)
    if joining:
        _plan_prompts(plan, joining, ids, positions, kv_heads, device)
    plan.input_ids = torch.tensor(ids, device=device)[None]
    plan.position_ids = torch.tensor(positions, device=device)[None]
    return plan


def _decode_mask(at: np.ndarray, longest: int, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    beyond = np.arange(longest)[None, :] > at[:, None]
    mask = np.where(beyond, np.float32(-np.inf), np.float32(0))
    return torch.from_numpy(mask.repeat(kv_heads, axis=0)[:, None]).to(dtype)


def _plan_prompts(
    plan: StepPlan,
    joining: list[Request],
    ids: list[int],
    positions: list[int],
    kv_heads: int,
    device: torch.device,
) -> None:
    """Append the distinct prompts of `joining` to the pass, shortest first."""
    prompts = _distinct_prompts(joining)
    prompts.sort(key=lambda prompt: len(prompt.ids))
    tokens_of: dict[LengthClass, list[np.ndarray]] = {}
    targets_of: dict[LengthClass, list[np.ndarray]] = {}
    starts: list[int] = []
    for prompt in prompts:
        start, size = len(ids), len(prompt.ids)
        starts.append(start)
        ids.extend(prompt.ids)
        positions.extend(range(size))
        places = np.arange(size)
        for request in prompt.requests:
            pool = request.pool
            assert pool is not None
            tokens_of.setdefault(pool, []).append(start + places)
            rows = request.row * kv_heads + np.arange(kv_heads)
            targets_of.setdefault(pool, []).append((rows[None, :] * pool.length + places[:, None]).reshape(-1))
            if request.input_logprobs_from is not None and request.input_logprobs is None:
                plan.scored.append((request, start, size))
    plan.writes = [
        PromptWrite(
            pool,
            torch.from_numpy(np.concatenate(tokens)).to(device),
            torch.from_numpy(np.concatenate(targets_of[pool])).to(device),
        )
        for pool, tokens in tokens_of.items()
    ]
    plan.blocks = _prompt_blocks([len(prompt.ids) for prompt in prompts], starts, device)


def _distinct_prompts(joining: list[Request]) -> list[_Prompt]:
    """The prompts of `joining` without their last token (and without those that had only one)."""
    distinct: dict[tuple[int, ...], _Prompt] = {}
    for request in joining:
        ids = (request.prompt_ids + request.output_ids)[:-1]
        prompt = distinct.setdefault(tuple(ids), _Prompt(ids))
        if prompt.requests:
            request.cached_tokens = len(ids)
        prompt.requests.append(request)
    for request in distinct.pop((), _Prompt([])).requests:
        if request.input_logprobs_from is not None:
            request.input_logprobs = [None]
    return list(distinct.values())


def _prompt_blocks(sizes: list[int], starts: list[int], device: torch.device) -> list[PromptBlock]:
    """Blocks of consecutive prompts (ascending `sizes`) that are at most twice as long as each other."""
    blocks: list[PromptBlock] = []
    first = 0
    while first < len(sizes):
        last = first
        while last + 1 < len(sizes) and sizes[last + 1] <= max(2 * sizes[first], 8):
            last += 1
        blocks.append(_block(np.array(sizes[first : last + 1]), starts[first], device))
        first = last + 1
    return blocks


def _block(sizes: np.ndarray, start: int, device: torch.device) -> PromptBlock:
    count, longest, total = len(sizes), int(sizes.max()), int(sizes.sum())
    if count * longest == total:
        return PromptBlock(count, longest, start, start + total, None, None)
    places = np.arange(longest)[None, :] < sizes[:, None]
    offsets = np.cumsum(sizes) - sizes
    gather = np.where(places, offsets[:, None] + np.arange(longest)[None, :], 0) + start
    return PromptBlock(
        count,
        longest,
        start,
        start + total,
        torch.from_numpy(gather.reshape(-1)).to(device),
        torch.from_numpy(np.flatnonzero(places)).to(device),
    )
