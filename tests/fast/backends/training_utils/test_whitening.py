from __future__ import annotations

import math

import torch

from miles.backends.training_utils.whitening import masked_whiten

VALUES, MASK = torch.tensor([1.0, 3.0, 50.0, 5.0]), torch.tensor([1.0, 1.0, 0.0, 1.0])


def test_mean_and_bessel_variance_of_the_unmasked() -> None:
    # Unmasked 1, 3, 5: mean 3, variance (4 + 0 + 4) / 2 = 4, so (x - 3) / 2; the masked 50 becomes 23.5.
    torch.testing.assert_close(masked_whiten(VALUES, MASK), torch.tensor([-1.0, 0.0, 23.5, 1.0]))


def test_ranks_together_give_what_one_rank_would() -> None:
    # Rank 0 has 1, 3 and the masked 50, rank 1 the 5. Sums over both: count 3, total 9, squares 8.
    others = iter([torch.tensor([1.0, 5.0], dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64)])
    ours = masked_whiten(VALUES[:3], MASK[:3], all_reduce_sum=lambda tensor: tensor + next(others))
    torch.testing.assert_close(ours, masked_whiten(VALUES, MASK)[:3])


def test_a_rank_without_unmasked_tokens_still_takes_part() -> None:
    calls: list[int] = []
    masked_whiten(torch.ones(2), torch.zeros(2), all_reduce_sum=lambda tensor: calls.append(1) or tensor)
    assert len(calls) == 2


def test_equal_values_become_zero_and_single_values_stay() -> None:
    assert masked_whiten(torch.full((4,), 0.7), torch.ones(4)).abs().max() < 1e-6
    assert masked_whiten(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 0.0])).tolist() == [2.0, 4.0]


def test_eps_is_inside_the_root() -> None:
    # Variance of +-1e-4 is 2e-8: the factor is 1 / sqrt(2e-8 + 1e-8).
    white = masked_whiten(torch.tensor([1e-4, -1e-4]), torch.ones(2))
    torch.testing.assert_close(white, torch.tensor([1e-4, -1e-4]) / math.sqrt(3e-8))
