"""Estimators of the KL divergence between two policies from the tokens that one of them wrote.

Schulman: Approximating KL Divergence (2020), http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import torch

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def estimate_kl(
    log_probs: torch.Tensor,
    base_log_probs: torch.Tensor,
    kl_type: str,
    *,
    old_log_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token estimate of KL(policy || base), with x = log_probs - base_log_probs:

        k1          x                  unbiased, may be negative
        k2          x^2 / 2
        k3          exp(-x) - 1 + x    unbiased, never negative
        low_var_kl  k3 with -x clamped to +-20 and the result to +-10

    With `old_log_probs`, the log-probabilities under the policy that wrote the tokens, the estimate is multiplied by
    the importance ratio exp(log_probs - old_log_probs), which makes it unbiased off-policy. Gradients flow through
    the ratio as well.
    """
    x = log_probs - base_log_probs
    if kl_type == "k1":
        kl = x
    elif kl_type == "k2":
        kl = x.square() / 2
    elif kl_type == "k3":
        kl = _k3(-x)
    elif kl_type == "low_var_kl":
        kl = _k3((-x).clamp(-20.0, 20.0)).clamp(-10.0, 10.0)
    else:
        raise ValueError(f"--kl-loss-type must be one of {', '.join(KL_TYPES)}, got {kl_type!r}")
    if old_log_probs is not None:
        kl = kl * (log_probs - old_log_probs).exp()
    return kl


def _k3(minus_x: torch.Tensor) -> torch.Tensor:
    # expm1 keeps the digits that exp(-x) - 1 loses near x = 0, where trained policies are.
    return torch.expm1(minus_x) - minus_x
