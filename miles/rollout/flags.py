"""Flags of the rollout side: which functions run, how they sample, and the fully asynchronous worker."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from miles.rollout import async_flags
from miles.utils.flag_rules import (
    EXPERIMENTAL_ROLLOUT_ENV,
    class_based_rollout_enabled,
    require,
    require_positive,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterator

FULLY_ASYNC_ROLLOUT_CLASS = "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn"
PLUGIN_PATHS = (
    "rollout_function_path",
    "custom_generate_function_path",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
    "custom_async_data_buffer_path",
)

NO_EFFECT = {
    "model_name": "the model family is read from config.json of --hf-checkpoint",
}


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    _add_function_flags(parser)
    _add_sampling_flags(parser)
    async_flags.add_flags(parser)


def _add_function_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("rollout functions")
    group.add_argument(
        "--hf-checkpoint",
        type=str,
        default=None,
        help="Directory of a Hugging Face checkpoint (config.json, tokenizer, safetensors): the model that is trained "
        "and served. Required.",
    )
    group.add_argument("--model-name", type=str, default=None, help="Name of the model family. None: from config.json.")
    group.add_argument(
        "--rollout-function-path",
        type=str,
        default=None,
        help="Dotted path of the rollout function or class. None: the standard one (the class InferenceRolloutFn where "
        f"{EXPERIMENTAL_ROLLOUT_ENV}=1, else the function sglang_rollout.generate_rollout).",
    )
    group.add_argument(
        "--custom-generate-function-path",
        type=str,
        default=None,
        help="Dotted path of the function that generates one sample. None: one turn of /generate.",
    )
    group.add_argument(
        "--dynamic-sampling-filter-path",
        type=str,
        default=None,
        help="Dotted path of fn(args, group) -> DynamicFilterOutput or bool; a group that it refuses is dropped and "
        "replaced. None: every group is kept.",
    )
    group.add_argument(
        "--rollout-sample-filter-path",
        type=str,
        default=None,
        help="Dotted path of fn(args, groups) that marks samples with remove_sample in place; they stay in the batch "
        "with a loss mask of zeros. None: no sample is marked.",
    )
    group.add_argument(
        "--rollout-all-samples-process-path",
        type=str,
        default=None,
        help="Dotted path of fn(args, all_groups, get_samples), called with every finished group of a rollout, the "
        "filtered ones too. None: nothing is called. Not with --fully-async.",
    )
    group.add_argument(
        "--custom-rollout-log-function-path",
        type=str,
        default=None,
        help="Dotted path of fn(rollout_id, args, samples, extra_metrics, rollout_time); a true result replaces the "
        "built-in logging. None: built-in logging only.",
    )
    group.add_argument(
        "--custom-eval-rollout-log-function-path",
        type=str,
        default=None,
        help="Dotted path of fn(rollout_id, args, data, extra_metrics); a true result replaces the built-in logging. "
        "None: built-in logging only.",
    )


def _add_sampling_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("rollout sampling")
    group.add_argument(
        "--rollout-temperature",
        type=float,
        default=1.0,
        help="Sampling temperature; log-probabilities of trainer and engine are of the scaled distribution. 0: greedy.",
    )
    group.add_argument("--rollout-top-p", type=float, default=1.0, help="Nucleus sampling threshold. 1.0: off.")
    group.add_argument("--rollout-top-k", type=int, default=-1, help="Sample among the k likeliest tokens. -1: all.")
    group.add_argument(
        "--rollout-max-context-len",
        type=int,
        default=None,
        help="Most tokens of prompt and response together. None: the model's own limit.",
    )
    group.add_argument(
        "--rollout-max-prompt-len",
        type=int,
        default=None,
        help="Longest prompt in tokens; longer ones are left out of the data. None: --rollout-max-context-len minus 1 "
        "where that is set, else no limit.",
    )
    group.add_argument(
        "--rollout-max-response-len",
        type=int,
        default=None,
        help="Most tokens of one response. None: up to --rollout-max-context-len, which must then be set.",
    )
    group.add_argument(
        "--rollout-skip-special-tokens",
        action="store_true",
        default=False,
        help="Leave special tokens out of the response text (not out of its tokens).",
    )
    group.add_argument(
        "--rollout-stop", type=str, nargs="+", default=None, help="Strings that end a response. None: end of text only."
    )
    group.add_argument(
        "--rollout-stop-token-ids",
        type=int,
        nargs="+",
        default=None,
        help="Token ids that end a response. None: the tokenizer's end of text only.",
    )
    group.add_argument("--rollout-seed", type=int, default=42, help="Seed of prompt shuffling and of seeded sampling.")
    group.add_argument(
        "--over-sampling-batch-size",
        type=int,
        default=None,
        help="Prompts that are submitted at a time while a batch fills; what is unfinished when the batch is full is "
        "aborted. At least --rollout-batch-size; None: equal to it. Synchronous rollout only.",
    )
    group.add_argument(
        "--partial-rollout",
        action="store_true",
        default=False,
        help="Keep the partial answers of aborted groups and continue them next time. Not with --fully-async.",
    )
    group.add_argument(
        "--mask-offpolicy-in-partial-rollout",
        action="store_true",
        default=False,
        help="With --partial-rollout: leave tokens of earlier rollouts out of the loss.",
    )


# Each row: the condition, the flag it is about, why it does not go together, and the remedy.
_FULLY_ASYNC_CONFLICTS: tuple[tuple[Callable[[Namespace], Any], str, str, str], ...] = (
    (
        lambda args: getattr(args, "colocate", False),
        "--colocate",
        "rollout must go on while training runs, and colocated engines are stopped for it",
        "give the engines their own devices and drop --colocate",
    ),
    (
        lambda args: getattr(args, "multi_lora_n_adapters", 0) or getattr(args, "multi_lora_adapter", None),
        "multi-LoRA (--multi-lora-*)",
        "it brings its own rollout function",
        "drop the --multi-lora-* flags or --fully-async",
    ),
    (
        lambda args: args.rollout_function_path,
        "--rollout-function-path",
        "--fully-async chooses the rollout function itself",
        "drop one of the two; --eval-function-path and --custom-generate-function-path may be set",
    ),
    (
        lambda args: not args.rollout_global_dataset,
        "--disable-rollout-global-dataset",
        "the worker pulls prompts from the global data set and puts aborted ones back into it",
        "drop --disable-rollout-global-dataset",
    ),
    (
        lambda args: args.partial_rollout,
        "--partial-rollout",
        "a recycled group starts over, so its partial answer would be dropped",
        "drop --partial-rollout; --pause-generation-mode retract or in_place keeps answers across weight updates",
    ),
    (
        lambda args: getattr(args, "recompute_logprobs_via_prefill", False),
        "--recompute-logprobs-via-prefill",
        "a group can cross a weight update before the drain, so a recompute there would score it under newer weights "
        "than wrote it",
        "drop it; the engine's own log-probabilities are used",
    ),
    (
        lambda args: args.rollout_all_samples_process_path,
        "--rollout-all-samples-process-path",
        "there is no end of a rollout at which all samples could be handed over",
        "use --rollout-sample-filter-path or --dynamic-sampling-filter-path",
    ),
    (
        lambda args: str(args.data_source_path).endswith("data_source.RolloutDataSource"),
        "--data-source-path miles.rollout.data_source.RolloutDataSource",
        "it cannot take back the groups that are recycled",
        "use miles.rollout.data_source.RolloutDataSourceWithBuffer (the default)",
    ),
)


def check_conflicts(args: Namespace) -> None:
    """Refuse what cannot go together with --fully-async; each message has the reason and the remedy."""
    if args.eval_function_path == FULLY_ASYNC_ROLLOUT_CLASS:
        raise ValueError(
            f"--eval-function-path {FULLY_ASYNC_ROLLOUT_CLASS}: the fully asynchronous worker serves training only. "
            "Instead: drop the flag, and evaluation uses the standard function"
        )
    if not args.fully_async:
        if args.rollout_function_path == FULLY_ASYNC_ROLLOUT_CLASS:
            raise ValueError(
                f"--rollout-function-path {FULLY_ASYNC_ROLLOUT_CLASS}: evaluation would use it too, which it does not "
                "serve. Instead: --fully-async, which chooses it for training only"
            )
        return
    conflicts = [
        f"--fully-async does not go together with {what}: {reason}. Instead: {remedy}."
        for holds, what, reason, remedy in _FULLY_ASYNC_CONFLICTS
        if holds(args)
    ]
    if not class_based_rollout_enabled():
        value = os.environ.get(EXPERIMENTAL_ROLLOUT_ENV)
        conflicts.append(
            f"--fully-async needs the class-based rollout API, and the environment variable {EXPERIMENTAL_ROLLOUT_ENV} "
            f"is {'not set' if value is None else f'{value!r}, which switches it off'}. "
            f"Instead: run with {EXPERIMENTAL_ROLLOUT_ENV}=1 (also in Ray's runtime_env env_vars)."
        )
    if conflicts:
        raise ValueError("\n".join(conflicts))


def resolve(args: Namespace) -> None:
    """Fill in the defaults that depend on other flags."""
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    async_flags.resolve(args)
    if args.rollout_max_context_len is not None:
        if args.rollout_max_prompt_len is None:
            args.rollout_max_prompt_len = args.rollout_max_context_len - 1
        if args.rollout_max_response_len is None:
            args.rollout_max_response_len = args.rollout_max_context_len


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    require(bool(args.hf_checkpoint), "--hf-checkpoint is required: the directory of a Hugging Face checkpoint")
    require(args.rollout_temperature >= 0, f"--rollout-temperature must be at least 0, got {args.rollout_temperature}")
    require(0 < args.rollout_top_p <= 1, f"--rollout-top-p must be in (0, 1], got {args.rollout_top_p}")
    require(
        args.rollout_top_k == -1 or args.rollout_top_k >= 1,
        f"--rollout-top-k must be -1 (all tokens) or at least 1, got {args.rollout_top_k}",
    )
    require_positive(
        args,
        "rollout_max_context_len",
        "rollout_max_prompt_len",
        "rollout_max_response_len",
    )
    async_flags.validate(args)
    require(
        args.rollout_max_response_len is not None or bool(args.custom_generate_function_path),
        "--rollout-max-response-len (or --rollout-max-context-len) is required: the most tokens of one response",
    )
    if args.rollout_max_context_len is not None:
        require(
            args.rollout_max_prompt_len < args.rollout_max_context_len,
            f"--rollout-max-prompt-len ({args.rollout_max_prompt_len}) must be less than --rollout-max-context-len "
            f"({args.rollout_max_context_len}), so that there is room for a response",
        )
        require(
            args.rollout_max_response_len is None or args.rollout_max_response_len <= args.rollout_max_context_len,
            f"--rollout-max-response-len ({args.rollout_max_response_len}) must not be greater than "
            f"--rollout-max-context-len ({args.rollout_max_context_len}), which prompt and response share",
        )
    require(
        args.over_sampling_batch_size >= args.rollout_batch_size,
        f"--over-sampling-batch-size ({args.over_sampling_batch_size}) must be at least --rollout-batch-size "
        f"({args.rollout_batch_size})",
    )
    require(
        args.partial_rollout or not args.mask_offpolicy_in_partial_rollout,
        "--mask-offpolicy-in-partial-rollout needs --partial-rollout",
    )


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags. `given` holds the dests that the user set."""
    if args.fully_async:
        if "over_sampling_batch_size" in given:
            yield "--over-sampling-batch-size has no effect with --fully-async, which always has groups in flight"
        return
    for dest in async_flags.DESTS:
        if dest in given:
            yield f"--{dest.replace('_', '-')} has no effect without --fully-async"
