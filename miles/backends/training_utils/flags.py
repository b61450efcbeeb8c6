"""Flags of the learning algorithm: batches, advantages, losses. No tensors here, only the rules between the values."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from miles.utils.flag_rules import require, require_fraction, require_not_negative, require_positive

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

PLUGIN_PATHS = (
    "custom_loss_function_path",
    "custom_tis_function_path",
    "custom_pg_loss_reducer_function_path",
)
NO_EFFECT = {
    "log_probs_chunk_size": "log-probabilities are computed one micro batch at a time; it only bounds memory",
}


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    _add_batch_flags(parser)
    _add_advantage_flags(parser)
    _add_loss_flags(parser)
    _add_correction_flags(parser)


def _add_batch_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("batches")
    group.add_argument(
        "--num-rollout", type=int, default=None, help="Rollouts (training batches) of the run. None: see --num-epoch."
    )
    group.add_argument(
        "--num-epoch",
        type=int,
        default=None,
        help="Length of the run in passes over the prompts, where --num-rollout is None.",
    )
    group.add_argument("--rollout-batch-size", type=int, required=True, help="Prompts of one rollout. Required.")
    group.add_argument("--n-samples-per-prompt", type=int, default=1, help="Samples generated for each prompt.")
    group.add_argument(
        "--global-batch-size",
        type=int,
        default=None,
        help="Samples of one optimizer step, over all data-parallel ranks. None: all samples of a rollout divided by "
        "--num-steps-per-rollout.",
    )
    group.add_argument(
        "--num-steps-per-rollout",
        type=int,
        default=None,
        help="Optimizer steps on one rollout. None: from --global-batch-size, else 1.",
    )
    group.add_argument("--micro-batch-size", type=int, default=1, help="Samples of one forward pass on one rank.")
    group.add_argument(
        "--use-dynamic-batch-size",
        action="store_true",
        default=False,
        help="Size micro batches by tokens (--max-tokens-per-gpu) instead of --micro-batch-size.",
    )
    group.add_argument(
        "--max-tokens-per-gpu",
        type=int,
        default=None,
        help="Most tokens of one micro batch on one rank. None: only without --use-dynamic-batch-size.",
    )
    group.add_argument(
        "--log-probs-max-tokens-per-gpu",
        type=int,
        default=None,
        help="The same for forward-only passes. None: --max-tokens-per-gpu.",
    )
    group.add_argument(
        "--balance-data",
        action="store_true",
        default=False,
        help="Share samples out so that data-parallel ranks get about equal numbers of tokens.",
    )
    group.add_argument(
        "--disable-rollout-trim-samples",
        action="store_true",
        default=False,
        help="Do not cut the samples of a rollout down to a multiple of --global-batch-size.",
    )
    group.add_argument(
        "--use-dynamic-global-batch-size",
        action="store_true",
        default=False,
        help="One optimizer step a rollout, on as many samples as there are (a multiple of the data-parallel size).",
    )
    group.add_argument(
        "--data-pad-size-multiplier",
        type=int,
        default=128,
        help="Packed micro batches are padded to a multiple of this many tokens.",
    )
    group.add_argument(
        "--log-probs-chunk-size", type=int, default=-1, help="Rows of logits handled at once. -1: all of a micro batch."
    )


def _add_advantage_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("advantages")
    group.add_argument(
        "--advantage-estimator",
        type=str,
        default="grpo",
        choices=["grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"],
        help="How rewards become advantages.",
    )
    group.add_argument(
        "--disable-compute-advantages-and-returns",
        action="store_false",
        dest="compute_advantages_and_returns",
        help="Compute none (for --loss-type sft_loss or a custom loss).",
    )
    group.add_argument("--gamma", type=float, default=1.0, help="Discount of later rewards. 1.0: none.")
    group.add_argument(
        "--normalize-advantages",
        action="store_true",
        default=False,
        help="Whiten advantages over the unmasked tokens of the batch.",
    )
    group.add_argument(
        "--disable-grpo-std-normalization",
        action="store_false",
        dest="grpo_std_normalization",
        help="Subtract the group's mean reward, but do not divide by its standard deviation.",
    )
    group.add_argument(
        "--disable-rewards-normalization",
        action="store_false",
        dest="rewards_normalization",
        help="Use rewards as they are: no group mean, no standard deviation.",
    )
    group.add_argument(
        "--kl-coef",
        type=float,
        default=0.0,
        help="Weight of the KL penalty in the reward (reinforce_plus_plus*). 0: none. Excludes --kl-loss-coef.",
    )
    group.add_argument(
        "--ref-load",
        type=str,
        default=None,
        help="Hugging Face checkpoint directory of the reference policy for KL. None: --hf-checkpoint where KL is "
        "used.",
    )


def _add_loss_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("loss")
    group.add_argument(
        "--loss-type",
        type=str,
        default="policy_loss",
        choices=["policy_loss", "sft_loss", "custom_loss"],
        help="What is minimised.",
    )
    group.add_argument(
        "--custom-loss-function-path",
        type=str,
        default=None,
        help="Dotted path of fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics). None: only without "
        "--loss-type custom_loss.",
    )
    group.add_argument("--eps-clip", type=float, default=0.2, help="Lower clip range of the probability ratio.")
    group.add_argument(
        "--eps-clip-high", type=float, default=None, help="Upper clip range of the probability ratio. None: --eps-clip."
    )
    group.add_argument(
        "--eps-clip-c",
        type=float,
        default=None,
        help="Dual-clip bound for negative advantages, greater than 1. None: no dual clip.",
    )
    group.add_argument(
        "--use-kl-loss",
        action="store_true",
        default=False,
        help="Compute the KL to the reference policy and add it to the loss with weight --kl-loss-coef.",
    )
    group.add_argument("--kl-loss-coef", type=float, default=0.0, help="Weight of the KL loss. 0: reported only.")
    group.add_argument(
        "--kl-loss-type",
        type=str,
        default="k1",
        choices=["k1", "k2", "k3", "low_var_kl"],
        help="Estimator of the KL (see John Schulman's note on approximating KL divergence).",
    )
    group.add_argument(
        "--use-unbiased-kl",
        action="store_true",
        default=False,
        help="Weight the KL by the probability ratio, which makes its gradient unbiased off policy.",
    )
    group.add_argument("--entropy-coef", type=float, default=0.0, help="Weight of the entropy bonus. 0: none.")
    group.add_argument(
        "--observe-training-entropy",
        action="store_true",
        default=False,
        help="Report the entropy also where --entropy-coef is 0 (costs a pass over the logits).",
    )
    group.add_argument(
        "--calculate-per-token-loss",
        action="store_true",
        default=False,
        help="Average the loss over tokens. Off: first within each sample, then over samples.",
    )
    group.add_argument(
        "--custom-pg-loss-reducer-function-path",
        type=str,
        default=None,
        help="Dotted path of fn(total_lengths, response_lengths, masks, per_token) -> reducer of the policy loss. "
        "None: built in.",
    )


def _add_correction_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("off-policy corrections")
    group.add_argument(
        "--use-rollout-logprobs",
        action="store_true",
        default=False,
        help="Take the engine's log-probabilities as the old policy. Off: the trainer recomputes them. Excludes "
        "--use-tis.",
    )
    group.add_argument(
        "--use-tis",
        action="store_true",
        default=False,
        help="Truncated importance sampling: weight each token by the probability ratio of trainer to engine.",
    )
    group.add_argument("--tis-clip", type=float, default=2.0, help="Largest TIS weight.")
    group.add_argument("--tis-clip-low", type=float, default=0, help="Smallest TIS weight.")
    group.add_argument(
        "--custom-tis-function-path",
        type=str,
        default=None,
        help="Dotted path of a function that replaces TIS's weighting. None: clamp to [--tis-clip-low, --tis-clip].",
    )
    group.add_argument(
        "--get-mismatch-metrics",
        action="store_true",
        default=False,
        help="Report how trainer and engine log-probabilities differ, also without --use-tis.",
    )
    group.add_argument(
        "--use-opsm",
        action="store_true",
        default=False,
        help="Off-policy sequence masking: leave out sequences with a negative advantage and a KL above --opsm-delta.",
    )
    group.add_argument("--opsm-delta", type=float, default=0.0001, help="KL per token above which OPSM masks.")


def data_parallel_size(args: Namespace) -> int:
    """Trainer ranks divided by the parallelisms that share one copy of the model."""
    require_positive(args, "actor_num_nodes", "actor_num_gpus_per_node")
    require_positive(args, *(f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context")))
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    require(
        world % model == 0,
        f"--actor-num-nodes x --actor-num-gpus-per-node ({world} ranks) must be a multiple of the model-parallel size "
        f"({model})",
    )
    return int(world // model)


def resolve(args: Namespace) -> None:
    """Fill in the defaults that depend on other flags."""
    require_positive(
        args,
        "num_epoch",
        "rollout_batch_size",
        "n_samples_per_prompt",
        "global_batch_size",
        "num_steps_per_rollout",
        "micro_batch_size",
        "max_tokens_per_gpu",
        "log_probs_max_tokens_per_gpu",
        "data_pad_size_multiplier",
    )
    _resolve_global_batch(args)
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.log_probs_max_tokens_per_gpu is None:
        args.log_probs_max_tokens_per_gpu = args.max_tokens_per_gpu
    if args.ref_load is None and uses_reference(args):
        args.ref_load = args.hf_checkpoint
    if args.n_samples_per_prompt == 1:
        # The standard deviation of one reward is undefined.
        args.grpo_std_normalization = False


def _resolve_global_batch(args: Namespace) -> None:
    """global_batch_size * num_steps_per_rollout == rollout_batch_size * n_samples_per_prompt."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    product = (
        f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt} "
        f"= {samples} samples"
    )
    steps, batch = args.num_steps_per_rollout, args.global_batch_size
    if args.use_dynamic_global_batch_size:
        require(
            steps in (None, 1),
            f"--use-dynamic-global-batch-size makes one step of a rollout, but --num-steps-per-rollout is {steps}",
        )
    if steps is not None:
        require(samples % steps == 0, f"{product} do not divide into --num-steps-per-rollout {steps}")
        require(
            batch is None or batch * steps == samples,
            f"--global-batch-size {batch} x --num-steps-per-rollout {steps} is not {product}; drop one of the two",
        )
        batch = samples // steps
    elif batch is None:
        batch = samples
    require(
        batch <= samples and samples % batch == 0,
        f"{product} do not divide into steps of --global-batch-size {batch}",
    )
    args.global_batch_size, args.num_steps_per_rollout = batch, samples // batch


def uses_reference(args: Namespace) -> bool:
    """Whether a reference policy is needed."""
    return bool(args.use_kl_loss or args.kl_coef != 0)


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    _validate_batches(args)
    _validate_algorithm(args)


def _validate_batches(args: Namespace) -> None:
    require_not_negative(args, "num_rollout")
    require(
        args.num_rollout is not None or args.num_epoch is not None,
        "--num-rollout (or --num-epoch) is required: the length of the run",
    )
    require(
        args.num_rollout is not None or args.rollout_global_dataset,
        "--num-epoch counts passes over the prompt file, and --disable-rollout-global-dataset loads none. "
        "Instead: --num-rollout",
    )
    ranks = data_parallel_size(args)
    require(
        args.use_dynamic_global_batch_size or args.global_batch_size % ranks == 0,
        f"--global-batch-size {args.global_batch_size} does not divide among {ranks} data-parallel ranks "
        "(--actor-num-nodes x --actor-num-gpus-per-node / model-parallel sizes)",
    )
    if args.use_dynamic_batch_size:
        require(
            args.max_tokens_per_gpu is not None,
            "--use-dynamic-batch-size needs --max-tokens-per-gpu, the most tokens of one micro batch",
        )
    elif not args.use_dynamic_global_batch_size:
        per_rank = args.global_batch_size // ranks
        require(
            per_rank % args.micro_batch_size == 0,
            f"--global-batch-size {args.global_batch_size} gives {per_rank} samples to each of {ranks} ranks, which do "
            f"not divide into --micro-batch-size {args.micro_batch_size}",
        )
    _validate_interleaving(args, ranks)


def _validate_interleaving(args: Namespace, ranks: int) -> None:
    """An interleaved pipeline takes micro-batches in groups; there must be a sample for each of a group's."""
    stages, pipeline = args.num_virtual_stages_per_pipeline_rank, args.pipeline_model_parallel_size
    if stages <= 1 or args.use_dynamic_global_batch_size:
        return
    per_rank = args.global_batch_size // ranks
    require(
        per_rank % pipeline == 0,
        f"--global-batch-size {args.global_batch_size} gives {per_rank} samples to each of {ranks} data-parallel "
        f"ranks, which with --num-virtual-stages-per-pipeline-rank {stages} must be a multiple of "
        f"--pipeline-model-parallel-size {pipeline}: an interleaved pipeline takes that many micro-batches at a time",
    )


def _validate_algorithm(args: Namespace) -> None:
    require(
        args.kl_coef == 0 or args.kl_loss_coef == 0,
        f"--kl-coef ({args.kl_coef}) and --kl-loss-coef ({args.kl_loss_coef}) exclude each other: KL is either in the "
        "reward or in the loss",
    )
    if args.advantage_estimator.startswith("reinforce_plus_plus"):
        require(
            args.normalize_advantages,
            f"--advantage-estimator {args.advantage_estimator} needs --normalize-advantages",
        )
    require(
        not (args.use_rollout_logprobs and args.use_tis),
        "--use-rollout-logprobs and --use-tis exclude each other: TIS weighs the trainer's own log-probabilities "
        "against the engine's. Instead: drop one of the two",
    )
    require(
        args.loss_type != "custom_loss" or args.custom_loss_function_path is not None,
        "--loss-type custom_loss needs --custom-loss-function-path",
    )
    require(
        not uses_reference(args) or os.path.isdir(args.ref_load or ""),
        f"--ref-load: {args.ref_load!r} is not a directory; it must be a Hugging Face checkpoint directory of the "
        "reference policy (converted *_torch_dist directories are not needed). None: --hf-checkpoint",
    )
    require_not_negative(args, "eps_clip", "eps_clip_high", "tis_clip_low", "opsm_delta")
    require_positive(args, "tis_clip")
    require_fraction(args, "gamma")
    require(
        args.tis_clip_low <= args.tis_clip,
        f"--tis-clip-low ({args.tis_clip_low}) must not be above --tis-clip ({args.tis_clip})",
    )
    require(
        args.eps_clip_c is None or args.eps_clip_c > 1, f"--eps-clip-c must be greater than 1, got {args.eps_clip_c}"
    )


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    if args.num_rollout is not None and args.num_epoch is not None:
        yield "--num-epoch has no effect: --num-rollout is given"
    if args.kl_loss_coef != 0 and not args.use_kl_loss:
        yield "--kl-loss-coef has no effect without --use-kl-loss"
    if "ref_load" in given and not uses_reference(args):
        yield "--ref-load has no effect without --use-kl-loss or --kl-coef: training starts from --hf-checkpoint"
    if args.use_dynamic_batch_size and "micro_batch_size" in given:
        yield "--micro-batch-size has no effect with --use-dynamic-batch-size"
    if not args.use_dynamic_batch_size and given & {"max_tokens_per_gpu", "log_probs_max_tokens_per_gpu"}:
        yield "--max-tokens-per-gpu and --log-probs-max-tokens-per-gpu have no effect without --use-dynamic-batch-size"
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu < (args.rollout_max_response_len or 0):
        yield (
            f"--max-tokens-per-gpu {args.max_tokens_per_gpu} is less than one answer may have "
            f"(--rollout-max-response-len {args.rollout_max_response_len}): a sample that is longer goes alone, and "
            "takes more memory than that"
        )
    if not args.use_tis and given & {"tis_clip", "tis_clip_low", "custom_tis_function_path"}:
        yield "the TIS flags (--tis-clip, --tis-clip-low, --custom-tis-function-path) have no effect without --use-tis"
    if not args.use_opsm and "opsm_delta" in given:
        yield "--opsm-delta has no effect without --use-opsm"
    if args.loss_type != "custom_loss" and args.custom_loss_function_path is not None:
        yield "--custom-loss-function-path has no effect without --loss-type custom_loss"
    if args.gamma != 1.0 and args.advantage_estimator != "reinforce_plus_plus":
        yield f"--gamma has no effect with --advantage-estimator {args.advantage_estimator}"
    if args.kl_coef != 0 and not args.advantage_estimator.startswith("reinforce_plus_plus"):
        yield f"--kl-coef has no effect with --advantage-estimator {args.advantage_estimator}; see --use-kl-loss"
    if args.n_samples_per_prompt == 1 and args.advantage_estimator in ("grpo", "gspo") and args.rewards_normalization:
        yield (
            f"--advantage-estimator {args.advantage_estimator} with --n-samples-per-prompt 1: a reward minus the mean "
            "of its group is 0, so nothing is learned"
        )
