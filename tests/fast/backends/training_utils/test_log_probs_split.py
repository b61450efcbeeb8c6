"""Logits that are split over ranks give the log-probabilities, entropies and gradients of the whole."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from miles.backends.training_utils import log_probs as module
from miles.backends.training_utils.log_probs import RowShard, VocabularyShard, response_log_probs

if TYPE_CHECKING:
    from collections.abc import Callable

TOTALS, RESPONSES = [5, 3], [3, 2]
VOCABULARY, TOKENS = 7, 8


class Ranks:
    """Two threads in the place of two processes, with an all-reduce between them."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=10)
        self._parts: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        with self._lock:
            self._parts.append(tensor.clone())
        self._barrier.wait()
        stacked = torch.stack(self._parts)
        self._barrier.wait()
        tensor.copy_(stacked.amax(0) if op == torch.distributed.ReduceOp.MAX else stacked.sum(0))
        self._parts.clear()
        self._barrier.wait()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(work, range(2)))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    both = Ranks()
    monkeypatch.setattr(module.dist, "all_reduce", both.all_reduce)
    return both


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, tokens, and weights that make a number of the results."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(TOKENS, VOCABULARY, generator=generator)
    logits[2, 5] = float("-inf")  # a masked entry
    tokens = torch.tensor([0, 6, 3, 1, 4, 2, 5, 0])
    return logits, tokens, torch.randn(2, sum(RESPONSES), generator=generator)


def value_and_gradient(
    logits: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, **split: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, [2, N], and the gradient of their weighted sum."""
    logits = logits.clone().requires_grad_()
    log_probs, entropies = response_log_probs(
        logits, tokens, TOTALS, RESPONSES, temperature=0.7, with_entropy=True, **split
    )
    assert entropies is not None
    results = torch.stack([torch.cat(log_probs), torch.cat(entropies)])
    (results * weights).sum().backward()
    assert logits.grad is not None
    return results.detach(), logits.grad


def test_ranks_that_share_the_vocabulary(ranks: Ranks) -> None:
    logits, tokens, weights = inputs()
    expected, gradient = value_and_gradient(logits, tokens, weights)
    columns = [(0, 4), (4, 7)]  # not equal: the padding behind the vocabulary is left out

    def work(rank: int) -> Any:
        start, end = columns[rank]
        shard = VocabularyShard(start, group=None)  # type: ignore[arg-type]
        return value_and_gradient(logits[:, start:end], tokens, weights, shard=shard)

    found = ranks.run(work)
    for results, _ in found:
        torch.testing.assert_close(results, expected)
    torch.testing.assert_close(torch.cat([part for _, part in found], dim=1), gradient)


def test_ranks_that_share_the_tokens(ranks: Ranks) -> None:
    logits, tokens, weights = inputs()
    expected, gradient = value_and_gradient(logits, tokens, weights)
    places = [torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])]

    def work(rank: int) -> Any:
        local = torch.full((TOKENS,), -1)
        local[places[rank]] = torch.arange(len(places[rank]))
        rows = RowShard(local, group=None)  # type: ignore[arg-type]
        return value_and_gradient(logits[places[rank]], tokens, weights, rows=rows)

    found = ranks.run(work)
    for rank, (results, part) in enumerate(found):
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(part, gradient[places[rank]])


def test_padding_between_samples_is_skipped() -> None:
    logits, tokens, _ = inputs()
    wide = torch.full((TOKENS + 3, VOCABULARY), 9.0)
    row = torch.full((TOKENS + 3,), 6)
    wide[:5], wide[8:], row[:5], row[8:] = logits[:5], logits[5:], tokens[:5], tokens[5:]
    expected, _ = response_log_probs(logits, tokens, TOTALS, RESPONSES)
    found, _ = response_log_probs(wide, row, TOTALS, RESPONSES, starts=[0, 8])
    torch.testing.assert_close(found, expected)
