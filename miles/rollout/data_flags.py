"""Flags of prompts and evaluation data."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from miles.utils.eval_config import resolve_eval_datasets
from miles.utils.flag_rules import json_value, require, require_file, require_not_negative, require_positive

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

PLUGIN_PATHS = ("data_source_path", "buffer_filter_path", "eval_function_path")
DEFAULT_DATA_SOURCE = "miles.rollout.data_source.RolloutDataSourceWithBuffer"
DATA_SUFFIXES = (".jsonl", ".parquet")


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    _add_prompt_flags(parser)
    _add_eval_flags(parser)


def _add_prompt_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompt-data",
        type=str,
        default=None,
        help="Prompts: a .jsonl or .parquet file, with path@[a:b] for a slice of its rows. None: only with "
        "--data-source-path or --disable-rollout-global-dataset.",
    )
    group.add_argument(
        "--data-source-path",
        type=str,
        default=DEFAULT_DATA_SOURCE,
        help="Dotted path of the class(args) that hands out prompt groups and takes them back.",
    )
    group.add_argument(
        "--disable-rollout-global-dataset",
        action="store_false",
        dest="rollout_global_dataset",
        help="Load no prompt file: the rollout function finds its own prompts. Not with --fully-async.",
    )
    group.add_argument(
        "--buffer-filter-path",
        type=str,
        default=None,
        help="Dotted path of fn(args, rollout_id, buffer, num_samples) that pops groups from the buffer of returned "
        "ones. None: first in, first out.",
    )
    group.add_argument("--input-key", type=str, default="input", help="Field of a row that holds the prompt.")
    group.add_argument(
        "--label-key", type=str, default=None, help="Field that holds the right answer. None: rows have none."
    )
    group.add_argument("--metadata-key", type=str, default="metadata", help="Field that holds a sample's metadata.")
    group.add_argument("--tool-key", type=str, default="tools", help="Field that holds the tools of a chat prompt.")
    group.add_argument(
        "--apply-chat-template",
        action="store_true",
        default=False,
        help="Turn a prompt (text, or a list of messages) into text with the tokenizer's chat template.",
    )
    group.add_argument(
        "--apply-chat-template-kwargs",
        type=json_value,
        default="{}",
        help="JSON object of further arguments to the chat template.",
    )
    group.add_argument(
        "--chat-template-path",
        type=str,
        default=None,
        help="File with a Jinja chat template to use. None: the tokenizer's own.",
    )
    group.add_argument(
        "--rollout-shuffle",
        action="store_true",
        default=False,
        help="Shuffle the prompts, anew each epoch (--rollout-seed).",
    )


def _add_eval_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation")
    group.add_argument(
        "--eval-function-path",
        type=str,
        default=None,
        help="Dotted path of the function or class that evaluates. None: the standard rollout function, or "
        "--rollout-function-path where that is given.",
    )
    group.add_argument(
        "--eval-interval", type=int, default=None, help="Evaluate after every this many rollouts. None: never."
    )
    group.add_argument(
        "--eval-prompt-data",
        type=str,
        nargs="+",
        default=None,
        help="Evaluation data sets, as pairs NAME PATH (or one PATH alone). None: see --eval-config.",
    )
    group.add_argument(
        "--eval-config",
        type=str,
        default=None,
        help="YAML file with `defaults` and `datasets`, instead of --eval-prompt-data. None: no file.",
    )
    group.add_argument(
        "--skip-eval-before-train", action="store_true", default=False, help="Do not evaluate before the first step."
    )
    group.add_argument(
        "--n-samples-per-eval-prompt", type=int, default=1, help="Answers generated for each evaluation prompt."
    )
    for dest, kind, what in (
        ("input_key", str, "field with the prompt"),
        ("label_key", str, "field with the right answer"),
        ("tool_key", str, "field with the tools"),
        ("temperature", float, "sampling temperature; 0: greedy"),
        ("top_p", float, "nucleus sampling threshold; 1.0: off"),
        ("top_k", int, "sample among the k likeliest tokens; -1: all"),
        ("max_response_len", int, "most tokens of one response"),
        ("max_prompt_len", int, "longest prompt in tokens"),
        ("max_context_len", int, "most tokens of prompt and response together"),
        ("min_new_tokens", int, "fewest tokens of one response"),
    ):
        same = "no minimum" if dest == "min_new_tokens" else "the value of training"
        group.add_argument(
            f"--eval-{dest.replace('_', '-')}", type=kind, default=None, help=f"Evaluation: {what}. None: {same}."
        )


def split_slice(path: str) -> str:
    """The file of `path` or `path@[a:b]`."""
    return re.sub(r"@\[[^\]]*\]$", "", path)


def check_data_file(flag: str, path: str) -> None:
    """The data file that `path` (with or without a row slice) names exists and has a known format."""
    file = split_slice(path)
    require_file(flag, file, "the data file")
    require(file.endswith(DATA_SUFFIXES), f"{flag}: {file!r} has an unknown format; known: {', '.join(DATA_SUFFIXES)}")


def resolve(args: Namespace) -> None:
    """Fill in the defaults that depend on other flags."""
    args.eval_datasets = resolve_eval_datasets(args)


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule or a file is missing."""
    require(
        isinstance(args.apply_chat_template_kwargs, dict),
        f"--apply-chat-template-kwargs must be a JSON object, got {args.apply_chat_template_kwargs!r}",
    )
    if args.rollout_global_dataset and args.data_source_path == DEFAULT_DATA_SOURCE:
        require(
            args.prompt_data is not None,
            "--prompt-data is required: a .jsonl or .parquet file of prompts (or --disable-rollout-global-dataset)",
        )
    if args.prompt_data is not None:
        check_data_file("--prompt-data", args.prompt_data)
    if args.chat_template_path is not None:
        require_file("--chat-template-path", args.chat_template_path, "the chat template")
    _validate_eval(args)


def _validate_eval(args: Namespace) -> None:
    require_positive(args, "eval_interval", "n_samples_per_eval_prompt", "eval_max_response_len", "eval_max_prompt_len")
    require_positive(args, "eval_max_context_len")
    require_not_negative(args, "eval_temperature", "eval_min_new_tokens")
    _check_eval_lengths(args)
    for dataset in args.eval_datasets:
        check_data_file(f"evaluation data set {dataset.name}", dataset.path)
        if dataset.rm_type is not None:
            from miles.rollout.rm_hub import check_rm_type

            check_rm_type(dataset.rm_type)
    if args.eval_interval is None:
        return
    require(
        bool(args.eval_datasets) or args.eval_function_path is not None,
        "--eval-interval needs something to evaluate: --eval-prompt-data NAME PATH, or --eval-config",
    )
    require(
        not args.group_rm,
        "--group-rm does not go together with --eval-interval: evaluation scores one answer at a time. "
        "Instead: drop --group-rm, or evaluate in a run of its own",
    )


def _check_eval_lengths(args: Namespace) -> None:
    """Prompts and answers fit into evaluation's context where a flag sets one.

    An answer's limit that is training's may be longer: it was not set for evaluation, and answers are cut anyway.
    """
    flag = "--rollout-max-context-len" if args.eval_max_context_len is None else "--eval-max-context-len"
    context = args.eval_max_context_len or args.rollout_max_context_len
    if context is None:
        return
    require(
        args.eval_max_prompt_len is None or args.eval_max_prompt_len < context,
        f"--eval-max-prompt-len ({args.eval_max_prompt_len}) must be less than {flag} ({context}), so that there is "
        "room for a response",
    )
    for dataset in args.eval_datasets:
        length = dataset.max_response_len
        require(
            length is None or length <= context or length == args.rollout_max_response_len,
            f"evaluation data set {dataset.name}: max_response_len ({length}) must not be greater than {flag} "
            f"({context}), which prompt and response share",
        )


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    if args.eval_interval is None and given & {"eval_prompt_data", "eval_config", "eval_function_path"}:
        yield "evaluation is configured but never runs: --eval-interval is not set"
    if args.apply_chat_template_kwargs and not args.apply_chat_template:
        yield "--apply-chat-template-kwargs has no effect without --apply-chat-template"
