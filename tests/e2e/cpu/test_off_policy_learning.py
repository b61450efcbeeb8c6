"""Off-policy data is what fully asynchronous training is about: the trainer's correction for it must carry a run that
plain policy gradient cannot."""

from __future__ import annotations

import logging
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import pytest

from examples.quickstart.prepare import prepare

if TYPE_CHECKING:
    from miles.backends.megatron_utils.trainer import MegatronTrainer

ROOT = Path(__file__).parents[3]
LAG, STEPS, SEEDS = 4, 60, (1, 2, 3)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
    pytest.mark.filterwarnings(
        "ignore:.past_key_values. is deprecated:FutureWarning"
    ),  # transformers' newer name: cache
    getattr(pytest.mark, "stage-a-cpu"),
]


@pytest.fixture(scope="module")
def base_model() -> Path:
    """The quickstart's own base model, from the quickstart's cache."""
    return prepare(ROOT / "examples/quickstart/data") / "base_model"


def make_trainer(base_model: Path, *, use_tis: bool) -> MegatronTrainer:
    from miles.backends.megatron_utils.trainer import MegatronTrainer
    from tests.fast.backends.megatron_utils.conftest import free_port
    from tests.fast.backends.megatron_utils.tiny_models import make_args

    args = make_args(
        base_model,
        lr=3e-4,
        lr_warmup_iters=10,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        clip_grad=1.0,
        num_rollout=STEPS,
        global_batch_size=256,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=8192,
        use_tis=use_tis,
        tis_clip=2.0,
        tis_clip_low=0.0,
    )
    return MegatronTrainer(args, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port())


def final_reward(base_model: Path, *, use_tis: bool, seed: int) -> float:
    """Mean reward of the policy after `STEPS` steps at a lag of `LAG` versions."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.e2e.cpu.sorting_run import Sampler, learn, mean_reward

    trainer = make_trainer(base_model, use_tis=use_tis)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
        sampler = Sampler(model.eval(), AutoTokenizer.from_pretrained(base_model))
        learn(trainer, sampler, seed=seed, lag=LAG, steps=STEPS)
        return mean_reward(sampler)
    finally:
        trainer.close()


def test_truncated_importance_sampling_learns_at_a_lag_where_plain_policy_gradient_does_not(base_model: Path) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    corrected = {seed: final_reward(base_model, use_tis=True, seed=seed) for seed in SEEDS}
    plain = {seed: final_reward(base_model, use_tis=False, seed=seed) for seed in SEEDS}
    found = f"with TIS {corrected}, without {plain} (by seed)"
    assert mean(corrected.values()) >= 0.75, found
    assert mean(corrected.values()) - mean(plain.values()) >= 0.2, found
