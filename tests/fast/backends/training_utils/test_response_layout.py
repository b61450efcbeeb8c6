from __future__ import annotations

import pytest
import torch

from miles.backends.training_utils.response_layout import ResponseLayout


@pytest.fixture
def layout() -> ResponseLayout:
    return ResponseLayout.of(
        {"response_lengths": [3, 0, 2], "loss_masks": [[1, 0, 1], [], [0, 0]], "sample_indices": [40, 41, 42]}
    )


def test_sums_means_and_expansion(layout: ResponseLayout) -> None:
    flat = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert layout.sum_by_sample(flat).tolist() == [7.0, 0.0, 24.0]
    assert layout.mask_sums.tolist() == [2.0, 0.0, 0.0]
    # (1 + 4) / 2; nothing over max(0, 1) twice.
    assert layout.masked_mean_by_sample(flat).tolist() == [2.5, 0.0, 0.0]
    assert layout.expand(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 1.0, 1.0, 3.0, 3.0]
    assert [part.tolist() for part in layout.split(flat)] == [[1.0, 2.0, 4.0], [], [8.0, 16.0]]


def test_masked_zeroes_what_does_not_count_and_blocks_its_gradient(layout: ResponseLayout) -> None:
    flat = torch.tensor([1.0, 2.0, torch.nan, torch.inf, 5.0], requires_grad=True)
    masked = layout.masked(flat)
    assert masked.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    masked.sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_wrong_length_names_field_and_sample(layout: ResponseLayout) -> None:
    with pytest.raises(ValueError, match=r"ref_log_probs: sample 42 has shape \(1,\), its response has 2 tokens"):
        layout.flatten("ref_log_probs", [[0.0] * 3, [], [0.0]], needed_by="--use-kl-loss")


def test_a_missing_field_names_what_needs_it(layout: ResponseLayout) -> None:
    with pytest.raises(ValueError, match="--use-tis needs 'rollout_log_probs', which the batch does not have"):
        layout.flatten("rollout_log_probs", None, needed_by="--use-tis")
    with pytest.raises(ValueError, match="--use-tis needs 'rollout_log_probs', which sample 40 does not have"):
        layout.flatten("rollout_log_probs", [None, [], [0.0, 0.0]], needed_by="--use-tis")
    with pytest.raises(ValueError, match="values: 1 entries for 3 samples"):
        layout.flatten("values", [[]], needed_by="ppo")


def test_a_loss_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_masks: sample 0"):
        ResponseLayout.of({"response_lengths": [2], "loss_masks": [[1]]})
