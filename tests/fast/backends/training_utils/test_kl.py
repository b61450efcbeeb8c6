from __future__ import annotations

import math

import pytest
import torch

from miles.backends.training_utils.kl import estimate_kl

LN2 = math.log(2)
# x = lp - base: ln 2 at the first token, -ln 2 at the second.
LP, BASE = torch.tensor([-1.0, -1.0 - LN2]), torch.tensor([-1.0 - LN2, -1.0])


@pytest.mark.parametrize(
    ("kl_type", "expected"),
    [
        ("k1", [LN2, -LN2]),
        ("k2", [LN2**2 / 2, LN2**2 / 2]),
        # exp(-x) - 1 + x: 1/2 - 1 + ln 2 = 0.193147 and 2 - 1 - ln 2 = 0.306853.
        ("k3", [LN2 - 0.5, 1 - LN2]),
        ("low_var_kl", [LN2 - 0.5, 1 - LN2]),
    ],
)
def test_estimators(kl_type: str, expected: list[float]) -> None:
    torch.testing.assert_close(estimate_kl(LP, BASE, kl_type), torch.tensor(expected))


def test_low_variance_clamps_the_exponent_and_the_result() -> None:
    # x = -30: -x is clamped to 20, exp(20) - 1 - 20 is far above 10. x = 30: exp(-20) - 1 + 20 = 19, clamped to 10.
    lp, base = torch.tensor([-40.0, 0.0]), torch.tensor([-10.0, -30.0])
    torch.testing.assert_close(estimate_kl(lp, base, "low_var_kl"), torch.tensor([10.0, 10.0]))
    torch.testing.assert_close(estimate_kl(lp, base, "k3")[1], torch.tensor(math.exp(-30) - 1 + 30))


def test_unbiased_multiplies_by_the_importance_ratio() -> None:
    # lp - old = ln 2 at both tokens: twice the plain estimate.
    old = LP - LN2
    torch.testing.assert_close(
        estimate_kl(LP, BASE, "k3", old_log_probs=old), torch.tensor([2 * (LN2 - 0.5), 2 * (1 - LN2)])
    )


@pytest.mark.parametrize(
    ("kl_type", "unbiased", "expected"),
    [
        ("k1", False, 1.0),
        ("k2", False, LN2),  # d/dlp x^2/2 = x
        ("k3", False, 0.5),  # d/dlp = -exp(-x) + 1
        # r = 2, k = ln 2 - 1/2: d/dlp (r k) = r k + r k' = 2 (ln 2 - 1/2) + 2 * 1/2 = 2 ln 2
        ("k3", True, 2 * LN2),
    ],
)
def test_gradients(kl_type: str, unbiased: bool, expected: float) -> None:
    lp = torch.tensor([-1.0], requires_grad=True)
    base, old = torch.tensor([-1.0 - LN2]), torch.tensor([-1.0 - LN2])
    estimate_kl(lp, base, kl_type, old_log_probs=old if unbiased else None).sum().backward()
    torch.testing.assert_close(lp.grad, torch.tensor([expected]))


def test_unbiased_k3_has_the_gradient_of_the_true_divergence() -> None:
    # Exact expectation over the tokens of the old policy: the estimate's mean is KL(policy || base), and so is its
    # gradient; that is what "unbiased" says.
    logits = torch.tensor([0.3, -0.2, 0.5, 0.1], requires_grad=True)
    base = torch.log_softmax(torch.tensor([0.0, 0.4, -0.3, 0.2]), -1)
    old = torch.log_softmax(torch.tensor([0.1, 0.1, 0.2, 0.0]), -1)
    lp = torch.log_softmax(logits, -1)
    estimate = (old.exp() * estimate_kl(lp, base, "k3", old_log_probs=old)).sum()
    exact = (lp.exp() * (lp - base)).sum()
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(
        torch.autograd.grad(estimate, logits, retain_graph=True)[0], torch.autograd.grad(exact, logits)[0]
    )


def test_small_differences_keep_their_digits() -> None:
    # x = 2^-12: k3 is x^2/2 - x^3/6 + ... = 2.98e-8, of which exp(-x) - 1 + x in float32 keeps nothing.
    x = 2.0**-12
    kl = estimate_kl(torch.tensor([x]), torch.tensor([0.0]), "k3")
    torch.testing.assert_close(kl, torch.tensor([x * x / 2]), rtol=1e-2, atol=0)


def test_an_unknown_estimator_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="--kl-loss-type must be one of k1, k2, k3, low_var_kl, got 'k4'"):
        estimate_kl(LP, BASE, "k4")
