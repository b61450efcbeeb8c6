"""What the losses read from the flags, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles.backends.training_utils.kl import KL_TYPES
from miles.backends.training_utils.reduce import sum_of_sample_mean
from miles.backends.training_utils.tis import vanilla_tis_function
from miles.utils.misc import load_function

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

LOSS_TYPES = ("policy_loss", "sft_loss", "custom_loss")
ADVANTAGE_ESTIMATORS = ("grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")


def check_choice(flag: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError naming the flag and what it knows."""
    if value not in choices:
        raise ValueError(f"{flag} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True)
class LossConfig:
    """The loss of one optimizer step; the defaults are the flags' defaults."""

    loss_type: str = "policy_loss"
    advantage_estimator: str = "grpo"
    """gspo uses one importance ratio for a whole sequence, every other estimator one for each token."""
    temperature: float = 1.0
    """Logits are divided by it where it is positive: the distribution that the tokens were sampled from."""
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    """Upper clip range; --eps-clip where the flag is not given."""
    eps_clip_c: float | None = None
    """Dual clip: bounds the loss by -c * A where A < 0. Above 1; None = off."""
    value_clip: float = 0.2
    use_kl_loss: bool = False
    """Compute the KL divergence from the reference model (also where its coefficient is 0, to observe it)."""
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    observe_training_entropy: bool = False
    calculate_per_token_loss: bool = False
    use_rollout_logprobs: bool = False
    """The engine's log-probabilities are the ratio's denominator, not the trainer's own."""
    use_tis: bool = False
    tis_clip_low: float = 0.0
    tis_clip: float = 2.0
    get_mismatch_metrics: bool = False
    """Report what the importance weights would be without applying them."""
    use_opsm: bool = False
    opsm_delta: float = 1e-4
    """Tokens of a sequence that has drifted further than this (mean log-ratio, nats) are dropped where A < 0."""
    tis_function: Callable[..., Any] = vanilla_tis_function
    pg_loss_reducer: Callable[..., Any] = sum_of_sample_mean
    custom_loss_function: Callable[..., Any] | None = None
    args: Namespace | None = field(default=None, repr=False, compare=False)
    """Passed to the custom functions, which expect it."""

    def __post_init__(self) -> None:
        check_choice("--loss-type", self.loss_type, LOSS_TYPES)
        check_choice("--advantage-estimator", self.advantage_estimator, ADVANTAGE_ESTIMATORS)
        check_choice("--kl-loss-type", self.kl_loss_type, KL_TYPES)
        if not 0 <= self.eps_clip <= 1:
            raise ValueError(f"--eps-clip must be in [0, 1], got {self.eps_clip}")
        if self.eps_clip_high < 0:
            raise ValueError(f"--eps-clip-high must not be negative, got {self.eps_clip_high}")
        if self.eps_clip_c is not None and self.eps_clip_c <= 1:
            raise ValueError(f"--eps-clip-c must be above 1, got {self.eps_clip_c}")
        if not 0 <= self.tis_clip_low <= self.tis_clip:
            raise ValueError(
                f"--tis-clip-low must be in [0, --tis-clip], got {self.tis_clip_low} with --tis-clip {self.tis_clip}"
            )
        if self.use_tis and self.use_rollout_logprobs:
            raise ValueError(
                "--use-tis corrects the trainer's log-probabilities for the engine's; with --use-rollout-logprobs "
                "there is nothing to correct: choose one of them"
            )
        if self.loss_type == "custom_loss" and self.custom_loss_function is None:
            raise ValueError("--loss-type custom_loss needs --custom-loss-function-path")

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropies are worth computing."""
        return self.entropy_coef != 0 or self.observe_training_entropy

    @property
    def needs_tis(self) -> bool:
        return self.use_tis or self.get_mismatch_metrics

    @classmethod
    def from_args(cls, args: Namespace) -> LossConfig:
        """Read the flags; loads the custom functions, so a wrong path is an error here and not in the first step."""
        given = {
            name: getattr(args, name)
            for name in cls.__dataclass_fields__
            if name not in _NOT_FLAGS and getattr(args, name, None) is not None
        }
        given.setdefault("eps_clip_high", given.get("eps_clip", cls.eps_clip))
        hooks = {
            name: load_function(path)
            for name, flag in _HOOK_FLAGS.items()
            if (path := getattr(args, flag, None)) is not None
        }
        return cls(
            **given,
            **{name: hook for name, hook in hooks.items() if hook is not None},
            temperature=getattr(args, "rollout_temperature", 1.0),
            args=args,
        )


_HOOK_FLAGS = {
    "tis_function": "custom_tis_function_path",
    "pg_loss_reducer": "custom_pg_loss_reducer_function_path",
    "custom_loss_function": "custom_loss_function_path",
}
_NOT_FLAGS = {*_HOOK_FLAGS, "temperature", "args"}
