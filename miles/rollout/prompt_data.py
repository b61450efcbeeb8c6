"""The prompts of a run, from its flags: the training file and the evaluation files.

`check_prompt_data(args)` reads them all, so that a driver can refuse a bad file before any process is started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.utils.data import Dataset
from miles.utils.eval_config import EvalDatasetConfig, resolve_eval_datasets

if TYPE_CHECKING:
    from argparse import Namespace


def load_prompt_dataset(args: Namespace, tokenizer: Any, processor: Any = None) -> Dataset:
    """The prompts of `--prompt-data`. Raises ValueError as `Dataset` does, and where the flag is not set."""
    if not getattr(args, "prompt_data", None):
        raise ValueError("--prompt-data is not set (or set --disable-rollout-global-dataset to run without a file)")
    return Dataset(
        args.prompt_data,
        tokenizer,
        processor,
        getattr(args, "rollout_max_prompt_len", None),
        prompt_key=getattr(args, "input_key", "input"),
        label_key=getattr(args, "label_key", None),
        tool_key=getattr(args, "tool_key", None),
        metadata_key=getattr(args, "metadata_key", "metadata"),
        **_context(args, getattr(args, "rollout_max_response_len", None), "rollout_max_context_len"),
        **_common_settings(args),
    )


def eval_configs(args: Namespace) -> list[EvalDatasetConfig]:
    """The evaluation data sets of a run, as parsed with the flags or else from the flags now."""
    configs = getattr(args, "eval_datasets", None)
    return resolve_eval_datasets(args) if configs is None else configs


def load_eval_dataset(args: Namespace, config: EvalDatasetConfig, tokenizer: Any, processor: Any = None) -> Dataset:
    """The prompts of one evaluation data set. Raises ValueError as `Dataset` does."""
    return Dataset(
        config.path,
        tokenizer,
        processor,
        getattr(args, "eval_max_prompt_len", None),
        prompt_key=config.input_key,
        label_key=config.label_key,
        tool_key=config.tool_key,
        metadata_key=config.metadata_key,
        **_context(args, config.max_response_len, "eval_max_context_len", "rollout_max_context_len"),
        **_common_settings(args),
    )


def check_prompt_data(args: Namespace) -> None:
    """Raise ValueError where a prompt file of the run cannot be used: missing, malformed (with the line), without a
    key, empty, sliced out of range, or with prompts that are longer than the context."""
    from miles.utils.processing_utils import load_tokenizer

    has_prompts = getattr(args, "rollout_global_dataset", True) and getattr(args, "prompt_data", None)
    configs = eval_configs(args)
    if not has_prompts and not configs:
        return
    tokenizer = load_tokenizer(args.hf_checkpoint, chat_template_path=getattr(args, "chat_template_path", None))
    if has_prompts:
        load_prompt_dataset(args, tokenizer)
    for config in configs:
        load_eval_dataset(args, config, tokenizer)


def _common_settings(args: Namespace) -> dict[str, Any]:
    return {
        "seed": getattr(args, "rollout_seed", 42),
        "multimodal_keys": getattr(args, "multimodal_keys", None),
        "apply_chat_template": getattr(args, "apply_chat_template", False),
        "apply_chat_template_kwargs": getattr(args, "apply_chat_template_kwargs", None),
    }


def _context(args: Namespace, max_response_len: int | None, *flags: str) -> dict[str, Any]:
    """What a prompt must leave room for, in which context.

    With one of the flags, answers are cut to what is left of that context, so one token is enough. Without, nothing
    is cut, and an engine refuses a request whose prompt and whole answer exceed the model's own context.
    """
    from miles.utils.processing_utils import model_context_length

    lengths = [length for flag in flags if (length := getattr(args, flag, None)) is not None]
    if lengths:
        return {"max_context_length": lengths[0]}
    return {
        "max_context_length": getattr(args, "sglang_context_length", None) or model_context_length(args.hf_checkpoint),
        "response_length": max_response_len or 1,
    }
