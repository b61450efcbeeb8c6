from __future__ import annotations

from argparse import Namespace

import torch

from miles.backends.training_utils.tis import icepop_function, vanilla_tis_function

ARGS = Namespace(tis_clip=2.0, tis_clip_low=0.5)
# Ratios exp(train - rollout): 1/4, 1, 3/2, 4.
RATIOS = torch.tensor([0.25, 1.0, 1.5, 4.0])
CALL = {
    "pg_loss": torch.tensor([1.0, 2.0, 2.0, 1.0]),
    "train_log_probs": [RATIOS[:2].log() - 1, RATIOS[2:].log() - 1],
    "rollout_log_probs": [torch.full((2,), -1.0), torch.full((2,), -1.0)],
    "loss_masks": [torch.ones(2), torch.ones(2)],
    "total_lengths": [3, 3],
    "response_lengths": [2, 2],
    "parallel_state": None,
    "max_seq_lens": None,
}


def test_weights_are_clamped() -> None:
    # Weights 0.5, 1, 1.5, 2.
    loss, masks, metrics = vanilla_tis_function(ARGS, **CALL)
    torch.testing.assert_close(loss, torch.tensor([0.5, 2.0, 3.0, 2.0]))
    assert [mask.tolist() for mask in masks] == [[1, 1], [1, 1]]
    torch.testing.assert_close(metrics["tis"], RATIOS)
    torch.testing.assert_close(metrics["tis_abs"], torch.tensor([0.75, 0.0, 0.5, 3.0]), atol=1e-6, rtol=1e-5)
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 0, 1]


def test_icepop_drops_tokens_out_of_range() -> None:
    loss, _, metrics = icepop_function(ARGS, **CALL)
    torch.testing.assert_close(loss, torch.tensor([0.0, 2.0, 3.0, 0.0]))
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 0, 1]


def test_a_ratio_that_overflows_is_clamped_or_dropped() -> None:
    call = {**CALL, "train_log_probs": [torch.tensor([500.0, -1.0]), torch.tensor([-1.0, -1.0])]}
    assert vanilla_tis_function(ARGS, **call)[0].tolist() == [2.0, 2.0, 2.0, 1.0]
    assert icepop_function(ARGS, **call)[0].tolist() == [0.0, 2.0, 2.0, 1.0]
