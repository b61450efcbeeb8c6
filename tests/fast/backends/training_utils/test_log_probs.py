from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils import log_probs as module
from miles.backends.training_utils.log_probs import response_log_probs, response_values


def reference(
    logits: torch.Tensor, tokens: torch.Tensor, totals: list[int], responses: list[int], temperature: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One log_softmax over everything, then a slice a sample."""
    everything = torch.log_softmax(logits / temperature, dim=-1)
    log_probs, entropies, end = [], [], 0
    for total, response in zip(totals, responses, strict=True):
        end += total
        rows = everything[end - response - 1 : end - 1]
        log_probs.append(rows.gather(1, tokens[end - response : end, None]).squeeze(1))
        entropies.append(-(rows.exp() * rows).sum(-1))
    return log_probs, entropies


def test_logits_predict_the_next_token() -> None:
    # Vocabulary of 2; logits (0, ln 3) are the distribution (1/4, 3/4), (0, 0) is (1/2, 1/2).
    ln3 = math.log(3)
    logits = torch.tensor([[0, ln3], [0, 0], [0, ln3], [9, 9], [0, ln3], [9, 9]])
    tokens = torch.tensor([0, 1, 0, 1, 1, 0])
    # Sample 0 is tokens 0 | 1 0 1: row 0 gives P(1) = 3/4, row 1 P(0) = 1/2, row 2 P(1) = 3/4.
    # Sample 1 is tokens 1 | 0: row 4 gives P(0) = 1/4. Rows 3 and 5 predict nothing that is ours.
    log_probs, entropies = response_log_probs(logits, tokens, [4, 2], [3, 1], with_entropy=True)
    torch.testing.assert_close(log_probs[0], torch.tensor([3 / 4, 1 / 2, 3 / 4]).log())
    torch.testing.assert_close(log_probs[1], torch.tensor([1 / 4]).log())
    # H(1/4, 3/4) = ln 4 - 3/4 ln 3, H(1/2, 1/2) = ln 2.
    skewed = math.log(4) - 0.75 * ln3
    assert entropies is not None
    torch.testing.assert_close(entropies[0], torch.tensor([skewed, math.log(2), skewed]))


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[0.0, 2 * math.log(3)], [0.0, 0.0]])
    hot, _ = response_log_probs(logits, torch.tensor([0, 1]), [2], [1], temperature=2.0)
    torch.testing.assert_close(hot[0], torch.tensor([3 / 4]).log())
    greedy, _ = response_log_probs(logits, torch.tensor([0, 1]), [2], [1], temperature=0.0)
    torch.testing.assert_close(greedy[0], torch.tensor([9 / 10]).log())


def test_prompt_rows_padding_and_the_last_row_get_no_gradient() -> None:
    logits = torch.randn(6, 5, requires_grad=True)
    log_probs, _ = response_log_probs(logits, torch.tensor([1, 2, 3, 4, 0, 0]), [4], [2])
    log_probs[0].sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum(-1).gt(0).tolist() == [False, True, True, False, False, False]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=4),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.integers(0, 2**31),
)
def test_values_and_gradients_equal_one_log_softmax(
    sizes: list[tuple[int, int]], temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    totals, responses = [p + r for p, r in sizes], [r for _, r in sizes]
    logits = torch.randn(sum(totals) + 2, 11, generator=generator).mul(3).requires_grad_()
    tokens = torch.randint(0, 11, (sum(totals) + 2,), generator=generator)
    weights = torch.randn(2, sum(responses), generator=generator)

    def weighted(pair: tuple[list[torch.Tensor], list[torch.Tensor] | None]) -> torch.Tensor:
        log_probs, entropies = pair
        assert entropies is not None
        return (torch.cat(log_probs) * weights[0] + torch.cat(entropies) * weights[1]).sum()

    ours = weighted(response_log_probs(logits, tokens, totals, responses, temperature=temperature, with_entropy=True))
    theirs = weighted(reference(logits, tokens, totals, responses, temperature))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(ours, logits)[0], torch.autograd.grad(theirs, logits)[0], atol=1e-5, rtol=1e-4
    )


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(20, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    tokens = torch.arange(20) % 7

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropies = response_log_probs(logits, tokens, [20], [17], temperature=0.8, with_entropy=True)
        assert entropies is not None
        total = (log_probs[0] * entropies[0]).sum()
        return total, torch.autograd.grad(total, logits)[0]

    whole = run()
    monkeypatch.setitem(module._CHUNK_ELEMENTS, "cpu", 15)
    for chunked, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(chunked, expected)


def test_masked_vocabulary_entries_give_no_nan() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    log_probs, entropies = response_log_probs(logits, torch.tensor([0, 2]), [2], [1], with_entropy=True)
    assert entropies is not None
    torch.testing.assert_close(entropies[0], torch.tensor([math.log(2)]))
    (3 * entropies[0] + log_probs[0]).sum().backward()
    assert logits.grad is not None
    # Entropy is stationary at the uniform distribution over two; log p_2 has the gradient [j = 2] - p_j.
    torch.testing.assert_close(logits.grad[0], torch.tensor([-0.5, 0.0, 0.5]))


def test_half_precision_logits_are_worked_on_in_float32() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    log_probs, _ = response_log_probs(logits, torch.tensor([1, 2, 3, 4]), [4], [3])
    expected, _ = reference(logits.float(), torch.tensor([1, 2, 3, 4]), [4], [3], 1.0)
    torch.testing.assert_close(log_probs[0], expected[0])
    log_probs[0].sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_only_the_logits_are_kept_for_the_backward_pass() -> None:
    saved: list[torch.Tensor] = []
    logits = torch.randn(50, 40, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        response_log_probs(logits, torch.arange(50) % 40, [50], [40], temperature=0.5, with_entropy=True)
    large = [tensor for tensor in saved if tensor.numel() >= 40 * 40]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]


def test_values_are_read_where_the_token_is_predicted() -> None:
    values = torch.arange(6.0).reshape(1, 6, 1)
    assert [row.tolist() for row in response_values(values, [4, 2], [2, 1])] == [[1.0, 2.0], [4.0]]


@pytest.mark.parametrize(
    ("totals", "responses", "message"),
    [
        ([3], [3], "at least one prompt token"),
        ([9], [1], "the row has 4 tokens"),
        ([2, 2], [1], "2 total_lengths, but 1 response_lengths"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(totals: list[int], responses: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        response_log_probs(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), totals, responses)
