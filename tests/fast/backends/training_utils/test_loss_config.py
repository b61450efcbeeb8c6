from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

import pytest

from miles.backends.training_utils.loss import LossConfig
from miles.backends.training_utils.tis import icepop_function, vanilla_tis_function


def test_flags_are_read_and_missing_ones_have_their_defaults() -> None:
    config = LossConfig.from_args(Namespace(eps_clip=0.1, use_tis=True, rollout_temperature=0.7))
    assert (config.eps_clip, config.eps_clip_high, config.use_tis, config.temperature) == (0.1, 0.1, True, 0.7)
    assert dataclasses.replace(config, args=None) == dataclasses.replace(
        LossConfig(eps_clip=0.1, eps_clip_high=0.1, use_tis=True, temperature=0.7)
    )


def test_an_explicit_upper_range_wins() -> None:
    assert LossConfig.from_args(Namespace(eps_clip=0.2, eps_clip_high=0.28)).eps_clip_high == 0.28
    assert LossConfig.from_args(Namespace(eps_clip=0.3, eps_clip_high=None)).eps_clip_high == 0.3


def test_hooks_are_loaded_by_path() -> None:
    path = "miles.backends.training_utils.loss.icepop_function"
    assert LossConfig.from_args(Namespace(custom_tis_function_path=path)).tis_function is icepop_function
    assert LossConfig.from_args(Namespace(custom_tis_function_path=None)).tis_function is vanilla_tis_function
    with pytest.raises(ValueError, match="icepop_functoin"):
        LossConfig.from_args(Namespace(custom_tis_function_path=path.replace("tion", "toin")))


def test_entropy_is_needed_only_where_it_is_used() -> None:
    assert not LossConfig().needs_entropy
    assert LossConfig(entropy_coef=0.01).needs_entropy
    assert LossConfig(observe_training_entropy=True).needs_entropy


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"loss_type": "dpo"}, "--loss-type must be one of policy_loss, sft_loss, custom_loss, got 'dpo'"),
        ({"eps_clip": -0.1}, r"--eps-clip must be in \[0, 1\], got -0.1"),
        ({"eps_clip_high": -1.0}, "--eps-clip-high"),
        ({"eps_clip_c": 1.0}, "--eps-clip-c must be above 1, got 1.0"),
        ({"tis_clip_low": 3.0}, "--tis-clip-low"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "choose one of them"),
        ({"loss_type": "custom_loss"}, "needs --custom-loss-function-path"),
        ({"kl_loss_type": "k5"}, "--kl-loss-type"),
        ({"advantage_estimator": "a2c"}, "--advantage-estimator"),
    ],
)
def test_mistakes_are_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig.from_args(Namespace(**flags))
