"""From logits to one token and its log-prob for each running request, vectorised over the batch.

Order: penalties, temperature; log-probs are of the distribution at this point (the whole one, which a full forward
gives too where there are no penalties); then min_new_tokens takes out the end tokens, top_k, top_p and min_p cut what
is left, and a token is drawn by inverting the cumulative distribution at one uniform number.

That number is a hash of the request's seed and the token's position, so a request draws the same numbers whatever
runs beside it, and again after it was retracted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from miles.backends.embedded_engine.random_numbers import uniforms

if TYPE_CHECKING:
    from miles.backends.embedded_engine.request import Request
    from miles.backends.embedded_engine.sampling_params import SamplingParams


class Sampler:
    """Draws tokens for a fixed list of requests; made anew when requests join, leave or change rows."""

    def __init__(self, requests: list[Request], device: torch.device) -> None:
        self._requests = requests
        self._device = device
        self._states = np.array([request.seed_state for request in requests], dtype=np.uint64)
        self._scales: torch.Tensor | None = None
        self._all_greedy = False
        self._greedy: torch.Tensor | None = None
        self._filtered: torch.Tensor | None = None
        self._penalized: list[int] = []
        self._delayed: list[int] = []
        if not all([request.is_plain for request in requests]):  # noqa: C419 - a list is faster here
            self._set_up_adjustments([request.params for request in requests])

    def _set_up_adjustments(self, params: list[SamplingParams]) -> None:
        """Which rows are greedy, scaled, filtered, penalised, or not yet allowed to end."""
        if any(p.scale != 1 for p in params):
            self._scales = self._column([p.scale for p in params])
        greedy = [p.is_greedy for p in params]
        self._all_greedy = all(greedy)
        if any(greedy):
            self._greedy = torch.tensor(greedy, device=self._device)
        filtered = [i for i, p in enumerate(params) if p.filters and not p.is_greedy]
        if filtered:
            chosen = [params[i] for i in filtered]
            self._filtered = torch.tensor(filtered, device=self._device)
            self._top_k = self._column([p.top_k if p.top_k > 0 else np.inf for p in chosen])
            self._top_p = self._column([p.top_p for p in chosen])
            self._min_p = self._column([p.min_p for p in chosen])
        self._penalized = [i for i, p in enumerate(params) if p.penalizes]
        self._delayed = [i for i, p in enumerate(params) if p.min_new_tokens]

    def sample(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Tokens and log-probs for the rows of `logits` [requests, vocab]."""
        logits = logits.float()
        if self._penalized:
            logits = self._penalize(logits.clone())
        if self._scales is not None:
            logits = logits / self._scales
        logprobs = torch.log_softmax(logits, dim=-1)
        tokens = self._choose(self._without_ends(logprobs) if self._delayed else logprobs)
        chosen = logprobs.gather(1, tokens)
        both = torch.cat((tokens.double(), chosen.double()), dim=1).cpu().numpy()
        ids: list[int] = both[:, 0].astype(np.int64).tolist()
        for i in self._penalized:
            self._requests[i].token_counts[ids[i]] += 1
        return ids, both[:, 1].tolist()

    def _choose(self, logprobs: torch.Tensor) -> torch.Tensor:
        """One token for each row, [requests, 1]."""
        if self._all_greedy:
            return logprobs.argmax(dim=-1, keepdim=True)
        probs = logprobs.exp()
        if self._filtered is not None:
            probs.index_copy_(0, self._filtered, self._cut(probs.index_select(0, self._filtered)))
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        positions = np.array([len(request.output_ids) for request in self._requests], dtype=np.uint64)
        drawn = torch.from_numpy(uniforms(self._states, positions))[:, None].to(self._device)
        # right=True: the first token whose cumulative probability is above the number, which has a probability itself.
        tokens = torch.searchsorted(cumulative, drawn * cumulative[:, -1:], right=True)
        tokens.clamp_(max=probs.shape[-1] - 1)  # only NaN logits get there
        if self._greedy is None:
            return tokens
        return torch.where(self._greedy[:, None], logprobs.argmax(dim=-1, keepdim=True), tokens)

    def _cut(self, probs: torch.Tensor) -> torch.Tensor:
        """`probs` with 0 for each token that top_k, top_p or min_p leave out; each looks at the whole distribution."""
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        rank = torch.arange(probs.shape[-1], device=self._device)
        keep = (rank < self._top_k) & (before <= self._top_p) & (ordered >= ordered[:, :1] * self._min_p)
        return torch.zeros_like(probs).scatter_(1, order, ordered * keep)

    def _without_ends(self, logprobs: torch.Tensor) -> torch.Tensor:
        """The distributions to draw from: no end token before min_new_tokens, the rest scaled up to 1."""
        allowed = logprobs.clone()
        for i in self._delayed:
            request = self._requests[i]
            if len(request.output_ids) < request.params.min_new_tokens:
                allowed[i, [token for token in request.end_ids if token < logprobs.shape[-1]]] = -torch.inf
                allowed[i] = torch.log_softmax(allowed[i], dim=-1)
        return allowed

    def _penalize(self, logits: torch.Tensor) -> torch.Tensor:
        """Penalties on tokens that the output has already."""
        for i in self._penalized:
            request, params = self._requests[i], self._requests[i].params
            if request.token_counts is None:
                request.token_counts = token_counts(request, logits.shape[-1], self._device)
            counts, row = request.token_counts, logits[i]
            occurs = counts > 0
            row -= params.frequency_penalty * counts + params.presence_penalty * occurs
            if params.repetition_penalty != 1:
                scaled = torch.where(row < 0, row * params.repetition_penalty, row / params.repetition_penalty)
                logits[i] = torch.where(occurs, scaled, row)
        return logits

    def _column(self, values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)[:, None]


def token_counts(request: Request, vocab_size: int, device: torch.device) -> torch.Tensor:
    """How often each token occurs in the output so far, [vocab] float32."""
    ids = torch.tensor(request.output_ids, dtype=torch.int64, device=device)
    return torch.bincount(ids, minlength=vocab_size).float()
