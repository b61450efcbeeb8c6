from __future__ import annotations

import torch

from miles.backends.training_utils.reduce import sum_of_sample_mean

MASKS = [torch.tensor([1, 1, 0]), torch.tensor([1, 1, 1, 1]), torch.tensor([0])]
FLAT = torch.tensor([1.0, 3.0, 100.0, 1.0, 2.0, 3.0, 6.0, 100.0])


def test_sum_of_sample_means() -> None:
    # (1 + 3) / 2 + (1 + 2 + 3 + 6) / 4 + 0 = 2 + 3 = 5: a long sample weighs as much as a short one.
    assert sum_of_sample_mean([9, 9, 9], [3, 4, 1], MASKS)(FLAT).item() == 5.0


def test_sum_of_tokens() -> None:
    # 1 + 3 + 1 + 2 + 3 + 6 = 16.
    assert sum_of_sample_mean([9, 9, 9], [3, 4, 1], MASKS, per_token=True)(FLAT).item() == 16.0


def test_a_masked_nan_does_not_spoil_value_or_gradient() -> None:
    flat = torch.tensor([1.0, 3.0, torch.nan], requires_grad=True)
    total = sum_of_sample_mean([4], [3], MASKS[:1])(flat)
    total.backward()
    assert total.item() == 2.0
    assert flat.grad is not None
    assert flat.grad.tolist() == [0.5, 0.5, 0.0]
