"""Reinforcement learning on the quickstart's task at a fixed lag, in one process: sampler, reward, trainer.

    sampler (weights of now) -> queue of `lag` rollouts -> trainer (weights `lag` updates later) -> weights -> sampler

The lag is what a fully asynchronous run has when its engines are that far behind; here it is exact.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from examples.quickstart.make_prompts import answer_of, problems, prompt_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPTS, GROUP, MAX_NEW_TOKENS = 16, 16, 12


@dataclass
class Sampler:
    """Batched sampling at temperature 1 with the Hugging Face model."""

    model: Any
    tokenizer: Any

    @torch.inference_mode()
    def sample(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        """For each prompt the sampled token ids, the end token included, and their log-probabilities."""
        end = self.tokenizer.eos_token_id
        width = max(map(len, prompts))
        ids = torch.tensor([[end] * (width - len(p)) + p for p in prompts])  # padded on the left
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = None
        tokens, log_probs = [], []
        alive = torch.ones(len(prompts), dtype=torch.bool)
        for _ in range(MAX_NEW_TOKENS):
            out = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            distribution = out.logits[:, -1].float().log_softmax(-1)
            ids = torch.multinomial(distribution.exp(), 1)
            log_probs.append(distribution.gather(1, ids).squeeze(1))
            tokens.append(ids.squeeze(1))
            alive &= tokens[-1] != end
            if not alive.any():
                break
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            positions = positions[:, -1:] + 1
        return [_until_end(t, lp, end) for t, lp in zip(_rows(tokens), _rows(log_probs), strict=True)]


def _rows(columns: list[torch.Tensor]) -> list[list[Any]]:
    rows: list[list[Any]] = torch.stack(columns, dim=1).tolist()
    return rows


def _until_end(tokens: list[int], log_probs: list[float], end: int) -> tuple[list[int], list[float]]:
    length = tokens.index(end) + 1 if end in tokens else len(tokens)
    return tokens[:length], log_probs[:length]


def rollout(sampler: Sampler, stream: Iterator[str]) -> dict[str, Any]:
    """A shard of `PROMPTS` x `GROUP` samples with group-normalised rewards."""
    digits = [next(stream) for _ in range(PROMPTS)]
    prompts = [sampler.tokenizer.encode(prompt_of(d)) for d in digits for _ in range(GROUP)]
    sampled = sampler.sample(prompts)
    answers = [[*sampler.tokenizer.encode(answer_of(d)), sampler.tokenizer.eos_token_id] for d in digits]
    raw = torch.tensor([float(tokens == answers[i // GROUP]) for i, (tokens, _) in enumerate(sampled)])
    groups = raw.view(PROMPTS, GROUP)
    rewards = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    return {
        "tokens": [prompt + tokens for prompt, (tokens, _) in zip(prompts, sampled, strict=True)],
        "response_lengths": [len(tokens) for tokens, _ in sampled],
        "loss_masks": [[1] * len(tokens) for tokens, _ in sampled],
        "rollout_log_probs": [log_probs for _, log_probs in sampled],
        "rewards": rewards.flatten().tolist(),
        "raw_reward": raw.tolist(),
        "global_batch_size": PROMPTS * GROUP,
    }


def learn(trainer: Any, sampler: Sampler, *, seed: int, lag: int, steps: int) -> None:
    """`steps` rollouts, each trained on `lag` updates after it was sampled."""
    torch.manual_seed(seed)
    stream = problems(random.Random(seed), held_out=False)
    waiting: deque[dict[str, Any]] = deque()
    for _ in range(lag):
        waiting.append(rollout(sampler, stream))
    for step in range(steps):
        waiting.append(rollout(sampler, stream))
        trainer.train(step, waiting.popleft())
        copy_weights(trainer, sampler)


def copy_weights(trainer: Any, sampler: Sampler) -> None:
    weights = sampler.model.state_dict()
    for name, tensor in trainer.hf_named_tensors():
        weights[name].copy_(tensor)


def mean_reward(sampler: Sampler, *, rollouts: int = 8) -> float:
    """Share of right answers to held-out problems at temperature 1, `PROMPTS` * `GROUP` samples a rollout."""
    stream = problems(random.Random(99), held_out=True)
    rewards = [reward for _ in range(rollouts) for reward in rollout(sampler, stream)["raw_reward"]]
    return sum(rewards) / len(rewards)
