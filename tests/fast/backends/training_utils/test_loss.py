"""The losses against numbers worked out by hand.

The micro-batch below: sample 40 has three response tokens of which the middle one is a tool's, sample 41 has one.

    token               a1      a2(tool)  a3      b1
    current / old       1       -         3/2     1/2
    old / rollout       1       -         4       1/2
    current / reference 2       -         1       1/2
    advantage           2       -         2       -4
"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import pytest
import torch

from miles.backends.training_utils.loss import LossConfig, loss_from_logits, policy_loss, sft_loss, value_loss
from miles.utils.misc import function_registry

LN = math.log
OLD = [[-1.0, -9.0, -1.0], [-1.0]]
CURRENT = [[-1.0, -5.0, -1.0 + LN(1.5)], [-1.0 + LN(0.5)]]
ROLLOUT = [[-1.0, 0.0, -1.0 - LN(4)], [-1.0 + LN(2)]]
REFERENCE = [[-1.0 - LN(2), 0.0, -1.0 + LN(1.5)], [-1.0]]


def tensors(rows: list[list[float]]) -> list[torch.Tensor]:
    return [torch.tensor(row) for row in rows]


def micro_batch(**fields: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3, 4], [1, 2]],
        "total_lengths": [4, 2],
        "response_lengths": [3, 1],
        "sample_indices": [40, 41],
        "loss_masks": [torch.tensor([1, 0, 1]), torch.tensor([1])],
        "advantages": tensors([[2.0, 2.0, 2.0], [-4.0]]),
        "log_probs": tensors(OLD),
        "rollout_log_probs": tensors(ROLLOUT),
        "ref_log_probs": tensors(REFERENCE),
        **fields,
    }


def run(
    config: LossConfig, entropies: list[list[float]] | None = None, **fields: Any
) -> tuple[float, dict[str, float], list[torch.Tensor]]:
    current = [row.requires_grad_() for row in tensors(CURRENT)]
    loss, metrics = policy_loss(
        config, micro_batch(**fields), current, None if entropies is None else tensors(entropies)
    )
    loss.backward()
    return loss.item(), {name: value.item() for name, value in metrics.items()}, [row.grad for row in current]


def approx(value: float) -> Any:
    return pytest.approx(value, rel=1e-5, abs=1e-6)


def test_clipped_policy_gradient_per_sample() -> None:
    # a1: -1 * 2 = -2. a3: max(-1.5 * 2, -1.2 * 2) = -2.4, clipped. b1: max(0.5 * 4, 0.8 * 4) = 3.2, clipped.
    # Means: (-2 - 2.4) / 2 = -2.2 and 3.2, sum 1.0.
    loss, metrics, gradients = run(LossConfig())
    assert loss == metrics["loss"] == metrics["pg_loss"] == approx(1.0)
    assert metrics["pg_clipfrac"] == approx(1 / 2 + 1)
    # Means of old - current: (0 - ln 1.5) / 2 and ln 2.
    assert metrics["ppo_kl"] == approx(-LN(1.5) / 2 + LN(2))
    # (1 + 1.5)^2 / (2 * (1 + 2.25)) = 6.25 / 6.5, and 1 for a single token.
    assert metrics["ess_ratio"] == approx(6.25 / 6.5 + 1)
    # |old - rollout|: 0, ln 4 and ln 2; means ln 4 / 2 = ln 2, and ln 2.
    assert metrics["train_rollout_logprob_abs_diff"] == approx(2 * LN(2))
    # k3 with rollout as the policy: r - 1 - ln r with r = old / rollout: 0; 3 - ln 4; -1/2 + ln 2.
    assert metrics["train_rollout_kl"] == approx((3 - LN(4)) / 2 - 0.5 + LN(2))
    # d(-r A / 2)/d lp = -r A / 2 = -1 at a1; clipped tokens and the tool's have no gradient.
    assert [row.tolist() for row in gradients] == [[-1.0, 0.0, 0.0], [0.0]]


def test_the_metric_names_are_the_interface() -> None:
    always = {
        "loss", "pg_loss", "pg_clipfrac", "ppo_kl", "ess_ratio", "train_rollout_logprob_abs_diff", "train_rollout_kl"
    }  # fmt: skip
    assert set(run(LossConfig())[1]) == always
    config = LossConfig(
        use_tis=True,
        use_opsm=True,
        use_kl_loss=True,
        observe_training_entropy=True,
        args=Namespace(tis_clip_low=0, tis_clip=2),
    )
    optional = {"entropy_loss", "kl_loss", "ois", "tis", "tis_clipfrac", "tis_abs", "opsm_clipfrac"}
    assert set(run(config, entropies=OLD)[1]) == always | optional


def test_per_token_reduction_adds_tokens_up() -> None:
    # -2 - 2.4 + 3.2 = -1.2; two of the three tokens are clipped; 2 * 6.25 / 6.5 + 1 * 1.
    loss, metrics, _ = run(LossConfig(calculate_per_token_loss=True))
    assert loss == approx(-1.2)
    assert metrics["pg_clipfrac"] == approx(2.0)
    assert metrics["ess_ratio"] == approx(2 * 6.25 / 6.5 + 1)


def test_gspo_uses_one_ratio_a_sequence() -> None:
    # Sample 40: mean log-ratio ln(1.5) / 2, ratio sqrt(1.5) = 1.2247, clipped at 1.2: -2.4 at both tokens.
    # Sample 41: as before 3.2. Sum -2.4 + 3.2 = 0.8.
    loss, metrics, _ = run(LossConfig(advantage_estimator="gspo"))
    assert loss == approx(0.8)
    assert metrics["ppo_kl"] == approx(-LN(1.5) / 2 + LN(2))


def test_gspo_spreads_the_gradient_over_the_sequence() -> None:
    # eps 0.3: unclipped, L = -2 s with s = exp((d1 + d3) / 2); dL/dd = -s at each unmasked token, and the mean over
    # two tokens of a constant is that constant.
    _, _, gradients = run(LossConfig(advantage_estimator="gspo", eps_clip_high=0.3))
    torch.testing.assert_close(gradients[0], torch.tensor([-math.sqrt(1.5), 0.0, -math.sqrt(1.5)]))


def test_dual_clip() -> None:
    # Advantage -4 at ratio 3/2 and c = 1.2: min(max(6, 4.8), 4.8) = 4.8 at a3; a1: 4. Mean 4.4, plus 3.2.
    loss, _, _ = run(LossConfig(eps_clip_c=1.2), advantages=tensors([[-4.0, 0.0, -4.0], [-4.0]]))
    assert loss == approx(4.4 + 3.2)


def test_entropy_bonus_is_subtracted() -> None:
    # Mean entropies (0.5 + 1.5) / 2 = 1 and 2: 1.0 - 0.1 * 3.
    loss, metrics, _ = run(LossConfig(entropy_coef=0.1), entropies=[[0.5, 9.0, 1.5], [2.0]])
    assert loss == approx(0.7)
    assert metrics["entropy_loss"] == approx(3.0)
    observed, metrics, _ = run(LossConfig(observe_training_entropy=True), entropies=[[0.5, 9.0, 1.5], [2.0]])
    assert (observed, metrics["entropy_loss"]) == (approx(1.0), approx(3.0))


def test_kl_loss_is_added() -> None:
    # k1: ln 2, 0 and -ln 2: means ln 2 / 2 and -ln 2. 1.0 + 0.5 * (-ln 2 / 2).
    loss, metrics, _ = run(LossConfig(use_kl_loss=True, kl_loss_coef=0.5))
    assert metrics["kl_loss"] == approx(-LN(2) / 2)
    assert loss == approx(1.0 - LN(2) / 4)


def test_unbiased_kl_weighs_by_current_over_old() -> None:
    # k3: ln 2 - 1/2, 0, 1 - ln 2; times 1, 3/2, 1/2.
    _, metrics, _ = run(LossConfig(use_kl_loss=True, kl_loss_type="k3", use_unbiased_kl=True))
    assert metrics["kl_loss"] == approx((LN(2) - 0.5) / 2 + (1 - LN(2)) / 2)


def test_opsm_drops_the_drifted_sequence() -> None:
    # Sample 41: A < 0 and old - current = ln 2 > delta: dropped. Sample 40 has A > 0. Left: -2.2.
    loss, metrics, _ = run(LossConfig(use_opsm=True))
    assert loss == approx(-2.2)
    assert metrics["opsm_clipfrac"] == approx(1.0)


TIS_ARGS = Namespace(tis_clip=2.0, tis_clip_low=0.0)


def test_tis_weighs_by_old_over_rollout() -> None:
    # Weights 1, min(4, 2) = 2, 1/2: (-2 - 4.8) / 2 + 1.6 = -1.8.
    loss, metrics, _ = run(LossConfig(use_tis=True, args=TIS_ARGS))
    assert loss == approx(-1.8)
    assert metrics["tis"] == approx((1 + 4) / 2 + 0.5)
    assert metrics["tis_abs"] == approx((0 + 3) / 2 + 0.5)
    assert metrics["tis_clipfrac"] == approx(0.5)
    assert metrics["ois"] == approx((1 + 1.5) / 2 + 0.5)


def test_tis_without_an_args_namespace_reads_its_limits_from_the_config() -> None:
    assert run(LossConfig(use_tis=True, tis_clip=3.0))[0] == approx((-2 - 7.2) / 2 + 1.6)


def test_mismatch_metrics_alone_leave_the_loss_as_it_is() -> None:
    loss, metrics, _ = run(LossConfig(get_mismatch_metrics=True, args=TIS_ARGS))
    assert loss == approx(1.0)
    assert metrics["tis_clipfrac"] == approx(0.5)


def test_icepop_by_path() -> None:
    # Weights 1, 0 (4 > 2), 1/2: (-2 + 0) / 2 + 1.6.
    path = "miles.backends.training_utils.loss.icepop_function"
    config = LossConfig.from_args(Namespace(use_tis=True, custom_tis_function_path=path, **vars(TIS_ARGS)))
    assert run(config)[0] == approx(0.6)


def test_a_custom_tis_function_may_change_the_masks() -> None:
    seen: dict[str, Any] = {}

    def drop_first(**call: Any) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
        seen.update(call)
        masks = [mask.clone() for mask in call["loss_masks"]]
        masks[0][0] = 0
        return call["pg_loss"] * 10, masks, {"mine": torch.ones(4), "scalar": torch.tensor(3.0)}

    with function_registry.temporary("drop_first", drop_first):
        config = LossConfig.from_args(Namespace(use_tis=True, custom_tis_function_path="drop_first"))
    # a1 is masked now, so sample 40 is its token a3 alone: -24 / 1 + 32.
    loss, metrics, _ = run(config)
    assert loss == approx(8.0)
    assert (metrics["mine"], metrics["scalar"]) == (approx(2.0), approx(6.0))
    assert {"args", "parallel_state", "max_seq_lens", "total_lengths", "response_lengths"} <= set(seen)
    assert [len(row) for row in seen["train_log_probs"]] == [3, 1]


def test_a_custom_reducer_reduces_the_policy_gradient_only() -> None:
    def fixed_budget(total_lengths: Any, response_lengths: Any, masks: Any, per_token: bool) -> Any:
        assert (total_lengths, response_lengths, per_token) == ([4, 2], [3, 1], False)
        return lambda flat: (flat * torch.cat(masks)).sum() / 10

    with function_registry.temporary("budget", fixed_budget):
        config = LossConfig.from_args(Namespace(custom_pg_loss_reducer_function_path="budget"))
    loss, metrics, _ = run(config)
    assert loss == approx((-2 - 2.4 + 3.2) / 10)
    assert metrics["pg_clipfrac"] == approx(1.5)


def test_the_rollouts_log_probs_as_denominator() -> None:
    # current / rollout: 1, 6, 1/4: -2, -2.4, 3.2: the clipped values are the same, the ratio is not.
    _, metrics, _ = run(LossConfig(use_rollout_logprobs=True))
    assert metrics["ppo_kl"] == approx(-LN(6) / 2 + LN(4))


def test_without_a_recomputation_the_comparison_takes_the_current_model() -> None:
    # current - rollout: 0, ln 6, -ln 4.
    _, metrics, _ = run(LossConfig(use_rollout_logprobs=True), log_probs=None)
    assert metrics["train_rollout_logprob_abs_diff"] == approx(LN(6) / 2 + LN(4))


def test_masked_and_non_finite_tokens_contribute_nothing() -> None:
    loss, metrics, gradients = run(
        LossConfig(),
        log_probs=tensors([[-1.0, float("nan"), -1.0], [float("-inf")]]),
        rollout_log_probs=None,
        advantages=tensors([[2.0, float("nan"), 2.0], [-4.0]]),
    )
    # Sample 41's only token has no probability: ratio and loss are left out, sample 40 is as before.
    assert metrics["ppo_kl"] == approx(-LN(1.5) / 2)
    assert loss == approx(-2.2)
    assert all(torch.isfinite(row).all() for row in gradients)
    assert gradients[1].tolist() == [0.0]


def test_a_removed_sample_contributes_nothing() -> None:
    loss, metrics, gradients = run(LossConfig(), loss_masks=[torch.zeros(3), torch.tensor([1])])
    assert loss == approx(3.2)
    assert metrics["ess_ratio"] == approx(1.0)
    assert gradients[0].tolist() == [0.0, 0.0, 0.0]


def test_cutting_into_micro_batches_does_not_change_the_sums() -> None:
    config = LossConfig(use_tis=True, use_kl_loss=True, kl_loss_coef=0.1, args=TIS_ARGS)
    whole = policy_loss(config, micro_batch(), tensors(CURRENT))
    parts = [
        policy_loss(
            config,
            {name: values[i : i + 1] for name, values in micro_batch().items()},
            tensors(CURRENT)[i : i + 1],
        )
        for i in range(2)
    ]
    for name, value in whole[1].items():
        torch.testing.assert_close(value, parts[0][1][name] + parts[1][1][name])


def test_value_loss_takes_the_larger_error() -> None:
    # Old 1, return 3, clip 0.2. V = 2: (2 - 3)^2 = 1 against (1.2 - 3)^2 = 3.24. V = 0.9: 4.41 twice, not clipped.
    batch = {
        "response_lengths": [2],
        "loss_masks": [torch.ones(2)],
        "values": tensors([[1.0, 1.0]]),
        "returns": tensors([[3.0, 3.0]]),
    }
    values = torch.tensor([2.0, 0.9], requires_grad=True)
    loss, metrics = value_loss(LossConfig(), batch, [values])
    loss.backward()
    assert loss.item() == metrics["value_loss"].item() == approx((3.24 + 4.41) / 2)
    assert metrics["value_clipfrac"].item() == approx(0.5)
    # No gradient where the clipped value rules; d/dV (0.9 - 3)^2 / 2 = -2.1.
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -2.1]))


def test_sft_loss_is_the_negative_mean_log_probability() -> None:
    loss, metrics = sft_loss(LossConfig(loss_type="sft_loss"), micro_batch(), tensors(OLD))
    assert loss.item() == metrics["loss"].item() == approx(2.0)


def packed_logits() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(6, 8, requires_grad=True), torch.tensor([1, 2, 3, 4, 1, 2])


def test_loss_from_logits_by_type() -> None:
    logits, tokens = packed_logits()
    # Uniform over 8: each log-probability is -ln 8, the entropy ln 8.
    loss, _ = loss_from_logits(LossConfig(loss_type="sft_loss"), micro_batch(), logits, tokens)
    assert loss.item() == approx(2 * LN(8))
    fields = {"log_probs": tensors([[-LN(8)] * 3, [-LN(8)]])}
    config = LossConfig(entropy_coef=1.0)
    loss, metrics = loss_from_logits(config, micro_batch(**fields), logits, tokens)
    assert metrics["pg_loss"].item() == approx(-2.0 + 4.0)
    assert loss.item() == approx(2.0 - 2 * LN(8))
    loss.backward()
    assert logits.grad is not None
    # Entropy is stationary at the uniform distribution. Token a1 (row 0, target 2): -A / 2 * ([j = 2] - 1/8).
    expected = torch.full((8,), 1 / 8)
    expected[2] -= 1
    torch.testing.assert_close(logits.grad[0], expected, atol=1e-6, rtol=1e-5)


def test_custom_loss_gets_logits_and_reducer() -> None:
    def squares(args: Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
        per_token = (logits[:4, 0] + args.shift).square()
        return sum_of_sample_mean(per_token), {"mine": per_token.sum()}

    with function_registry.temporary("squares", squares):
        config = LossConfig.from_args(
            Namespace(loss_type="custom_loss", custom_loss_function_path="squares", shift=3.0)
        )
    logits, tokens = packed_logits()
    loss, metrics = loss_from_logits(config, micro_batch(), logits, tokens)
    assert loss.item() == metrics["loss"].item() == approx(18.0)
    assert metrics["mine"].item() == approx(36.0)
    assert not metrics["mine"].requires_grad


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        ({"use_tis": True}, {"rollout_log_probs": None}, "--use-tis needs 'rollout_log_probs'"),
        ({"get_mismatch_metrics": True}, {"rollout_log_probs": None}, "--get-mismatch-metrics needs"),
        ({"use_rollout_logprobs": True}, {"rollout_log_probs": None}, "--use-rollout-logprobs needs"),
        ({"use_kl_loss": True}, {"ref_log_probs": None}, "--use-kl-loss needs 'ref_log_probs'"),
        ({"entropy_coef": 0.1}, {}, "--entropy-coef or --observe-training-entropy needs 'entropies'"),
        ({}, {"log_probs": None}, "--loss-type policy_loss needs 'log_probs'"),
        ({}, {"advantages": None}, "--loss-type policy_loss needs 'advantages'"),
        ({}, {"advantages": tensors([[1.0], [1.0]])}, r"advantages: sample 40 has shape \(1,\)"),
        ({"use_tis": True}, {"rollout_log_probs": [torch.zeros(3), None]}, "which sample 41 does not have"),
    ],
)
def test_missing_fields_name_flag_field_and_sample(
    config: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(LossConfig(**config), micro_batch(**fields), tensors(CURRENT))


def test_a_custom_tis_function_of_the_wrong_shape_is_named() -> None:
    config = LossConfig(use_tis=True, tis_function=lambda **call: (call["pg_loss"][:1], call["loss_masks"], {}))
    with pytest.raises(ValueError, match="--custom-tis-function-path returned pg_loss of shape"):
        policy_loss(config, micro_batch(), tensors(CURRENT))
