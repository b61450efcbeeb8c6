from __future__ import annotations

import math

import pytest
import torch

from miles.backends.training_utils.policy_terms import (
    clipped_objective,
    effective_sample_size,
    log_ratio,
    opsm_weights,
)
from miles.backends.training_utils.response_layout import ResponseLayout


def layout_of(*masks: list[int]) -> ResponseLayout:
    return ResponseLayout.of({"response_lengths": [len(mask) for mask in masks], "loss_masks": list(masks)})


def test_log_ratio_by_token_and_by_sequence() -> None:
    layout = layout_of([1, 0, 1], [1])
    old, current = torch.tensor([-1.0, -9.0, -2.0, -1.0]), torch.tensor([-1.5, -1.0, -2.1, -3.0])
    # old - current = 0.5, masked, 0.1 and 2; sequence means (0.5 + 0.1) / 2 = 0.3 and 2.
    torch.testing.assert_close(log_ratio(layout, old, current), torch.tensor([0.5, 0.0, 0.1, 2.0]))
    torch.testing.assert_close(log_ratio(layout, old, current, by_sequence=True), torch.tensor([0.3, 0.3, 0.3, 2.0]))


# (ratio, advantage) -> loss, clipped; eps 0.2 below, 0.3 above.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.25, 2.0, -2.5, 0.0),  # below 1 + 0.3
        (1.5, 2.0, -2.6, 1.0),  # max(-3, -1.3 * 2)
        (0.5, 2.0, -1.0, 0.0),  # max(-1, -1.6): a good token that has become rare is pulled back
        (0.5, -2.0, 1.6, 1.0),  # max(1, 0.8 * 2)
        (1.5, -2.0, 3.0, 0.0),  # max(3, 2.6)
        (5.0, -2.0, 10.0, 0.0),
    ],
)
def test_clipping(ratio: float, advantage: float, loss: float, clipped: float) -> None:
    ours, ours_clipped = clipped_objective(
        torch.tensor([-math.log(ratio)]), torch.tensor([advantage]), eps_low=0.2, eps_high=0.3
    )
    torch.testing.assert_close(ours, torch.tensor([loss]))
    assert ours_clipped.item() == clipped


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    # c = 3: ratio 5, A = -2 gives min(10, 6) = 6; ratio 2, A = -2 gives min(4, 6) = 4; A > 0 is not touched.
    ppo_kl = -torch.tensor([5.0, 2.0, 5.0]).log()
    loss, _ = clipped_objective(ppo_kl, torch.tensor([-2.0, -2.0, 2.0]), eps_low=0.2, eps_high=0.2, dual_clip=3.0)
    torch.testing.assert_close(loss, torch.tensor([6.0, 4.0, -2.4]))


def test_the_log_ratio_is_clamped_to_twenty() -> None:
    loss, _ = clipped_objective(torch.tensor([-500.0]), torch.tensor([-1.0]), eps_low=0.2, eps_high=0.2)
    torch.testing.assert_close(loss, torch.tensor([math.exp(20.0)]))


def test_gradient_flows_only_through_the_unclipped_branch() -> None:
    # At ratio r and A = 1: d(-r A)/d(ppo_kl) = r inside the range, 0 where the clipped branch rules.
    ppo_kl = (-torch.tensor([1.1, 1.5]).log()).requires_grad_()
    clipped_objective(ppo_kl, torch.ones(2), eps_low=0.2, eps_high=0.2)[0].sum().backward()
    torch.testing.assert_close(ppo_kl.grad, torch.tensor([1.1, 0.0]))


def test_opsm_drops_bad_tokens_of_drifted_sequences() -> None:
    # Sequence means of old - current: 0.3, 0.05, 0.3; delta 0.1; advantages -, -, +.
    layout = layout_of([1, 1], [1, 1], [1, 1])
    old, current = torch.zeros(6), -torch.tensor([0.5, 0.1, 0.1, 0.0, 0.5, 0.1])
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0])
    assert opsm_weights(layout, old, current, advantages, delta=0.1).tolist() == [0, 0, 1, 1, 1, 1]


def test_effective_sample_size() -> None:
    # Weights 1, 3 (and a masked 100): (1 + 3)^2 / (2 * (1 + 9)) = 0.8. A fully masked sample gives 0; equal weights 1.
    layout = layout_of([1, 1, 0], [0], [1, 1])
    ppo_kl = -torch.tensor([1.0, 3.0, 100.0, 5.0, 2.0, 2.0]).log()
    torch.testing.assert_close(effective_sample_size(layout, ppo_kl, per_token=False), torch.tensor(1.8))
    # Weighed by tokens: 2 * 0.8 + 2 * 1.
    torch.testing.assert_close(effective_sample_size(layout, ppo_kl, per_token=True), torch.tensor(3.6))


def test_effective_sample_size_survives_extreme_ratios() -> None:
    # One weight of e^20 beside e^-20: 1 / n.
    layout = layout_of([1, 1])
    size = effective_sample_size(layout, torch.tensor([-90.0, 90.0]), per_token=False)
    torch.testing.assert_close(size, torch.tensor(0.5))
