"""Model-shape flags of launch scripts. They build nothing: config.json decides; a flag that disagrees is an error."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING, Any

from miles.backends.megatron_utils.hf_config import HFModelConfig
from miles.backends.megatron_utils.weight_files import check_weights
from miles.utils.flag_rules import flag_name, require

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")

_NUMBERS = (
    ("num_layers", int, "Number of layers."),
    ("hidden_size", int, "Width of hidden states."),
    ("ffn_hidden_size", int, "Width of the feed-forward layers."),
    ("num_attention_heads", int, "Number of attention heads."),
    ("num_query_groups", int, "Number of key and value heads."),
    ("kv_channels", int, "Width of one attention head."),
    ("vocab_size", int, "Number of tokens."),
    ("max_position_embeddings", int, "Longest sequence that the model was made for."),
    ("norm_epsilon", float, "Epsilon of the norms."),
    ("rotary_base", float, "Base period of the rotary embedding."),
    ("rotary_percent", float, "Share of a head that is rotated."),
    ("num_experts", int, "Number of experts in a layer; 0: the layers are dense."),
    ("moe_router_topk", int, "Experts that a token goes through."),
    ("moe_ffn_hidden_size", int, "Width of an expert."),
    ("moe_shared_expert_intermediate_size", int, "Width of the expert that all tokens go through; 0: there is none."),
)
_SWITCHES = (
    ("group_query_attention", "Heads share keys and values."),
    ("use_rotary_position_embeddings", "Positions are rotary embeddings."),
    ("swiglu", "The feed-forward layers are gated with SiLU."),
    ("disable_bias_linear", "Linear layers have no bias."),
    ("add_qkv_bias", "Query, key and value projections have a bias."),
    ("qk_layernorm", "Queries and keys are normalised."),
    ("untie_embeddings_and_output_weights", "The output layer has weights of its own."),
    ("moe_router_pre_softmax", "Experts' weights are parts of the softmax over all experts."),
)
NO_EFFECT = {"seq_length": "sequences are packed at their own lengths"}


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    group = parser.add_argument_group(
        "model shape", "Optional: config.json of --hf-checkpoint decides, and a flag that disagrees is an error."
    )
    suffix = " None: from config.json; another value than there is an error."
    for dest, kind, what in _NUMBERS:
        group.add_argument(f"--{dest.replace('_', '-')}", type=kind, default=None, help=what + suffix)
    for dest, what in _SWITCHES:
        group.add_argument(
            f"--{dest.replace('_', '-')}",
            action="store_true",
            default=None,
            help=what + " Off: from config.json; given where config.json says otherwise is an error.",
        )
    group.add_argument(
        "--normalization", type=str, default=None, choices=["LayerNorm", "RMSNorm"], help="Kind of norm." + suffix
    )
    group.add_argument(
        "--position-embedding-type",
        type=str,
        default=None,
        choices=["learned_absolute", "rope", "mrope", "relative", "none"],
        help="Kind of position embedding." + suffix,
    )
    group.add_argument(
        "--moe-router-score-function",
        type=str,
        default=None,
        choices=["softmax", "sigmoid"],
        help="What makes scores of the router's logits." + suffix,
    )
    group.add_argument(
        "--moe-layer-freq",
        type=_all_layers,
        default=None,
        help="Which layers have experts: 1 or [1, 1, ...] or [1]*N, all of them; other patterns are not available. "
        "None: from config.json.",
    )
    group.add_argument("--seq-length", type=int, default=None, help="Length that Megatron allocates for. None: unset.")


def _all_layers(text: str) -> str:
    """The argparse type of --moe-layer-freq: a pattern that names every layer."""
    if not re.fullmatch(r"1|\(?\[1(,1)*\](\*\d+)?\)?", text.replace(" ", "")):
        raise argparse.ArgumentTypeError(f"must give every layer experts (1, or [1]*N), got {text!r}")
    return text


def read_hf_config(directory: str) -> HFModelConfig:
    """The model's shape, after checking that `directory` is a checkpoint.

    Raises ValueError for a missing directory, config.json, tokenizer or weight file, and for a model that cannot be
    built.
    """
    require(
        os.path.isdir(directory),
        f"--hf-checkpoint: {directory!r} is not a directory (current directory: {os.getcwd()}). "
        "Download the model first, for example with `hf download NAME --local-dir DIRECTORY`",
    )
    try:
        hf = HFModelConfig.from_dir(directory)
    except ValueError as error:
        raise ValueError(f"--hf-checkpoint: {error}") from error
    require(
        any(os.path.isfile(os.path.join(directory, name)) for name in TOKENIZER_FILES),
        f"--hf-checkpoint: {directory!r} has no tokenizer (none of {', '.join(TOKENIZER_FILES)})",
    )
    try:
        check_weights(directory)
    except ValueError as error:
        raise ValueError(f"--hf-checkpoint: {error}") from error
    return hf


def shape_of(hf: HFModelConfig) -> dict[str, Any]:
    """What config.json says about each shape flag, by dest."""
    return {
        "num_layers": hf.num_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_heads,
        "num_query_groups": hf.num_kv_heads,
        "kv_channels": hf.head_dim,
        "vocab_size": hf.vocab_size,
        "max_position_embeddings": hf.max_position_embeddings,
        "norm_epsilon": hf.rms_norm_eps,
        "rotary_base": hf.rope_theta,
        "rotary_percent": 1.0,
        "group_query_attention": hf.num_kv_heads != hf.num_heads,
        "use_rotary_position_embeddings": True,
        "swiglu": True,
        "disable_bias_linear": True,
        "add_qkv_bias": hf.qkv_bias,
        "qk_layernorm": hf.qk_norm,
        "untie_embeddings_and_output_weights": not hf.tie_word_embeddings,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "num_experts": hf.moe.num_experts if hf.moe else 0,
        "moe_router_topk": hf.moe.top_k if hf.moe else 0,
        "moe_ffn_hidden_size": hf.moe.intermediate_size if hf.moe else 0,
        "moe_shared_expert_intermediate_size": 0,
        "moe_router_pre_softmax": bool(hf.moe and not hf.moe.renormalize),
        "moe_router_score_function": "softmax",
    }


def validate(args: Namespace) -> None:
    """Raise ValueError where a shape flag disagrees with config.json, or a length does not fit into its context.

    Fills in the context length from config.json where no flag gives it.
    """
    if not args.hf_checkpoint:
        return  # the flag is required by its owner, miles.rollout.flags
    hf = read_hf_config(args.hf_checkpoint)
    shape = shape_of(hf)
    for dest, expected in shape.items():
        value = getattr(args, dest)
        if value is None or _same(value, expected):
            continue
        flag = flag_name(dest)
        given = flag if value is True else f"{flag} {value}"
        raise ValueError(
            f"{given} disagrees with {os.path.join(args.hf_checkpoint, 'config.json')}, which says {expected}. The "
            f"checkpoint decides the shape. Instead: drop {flag}"
        )
    _check_lengths(args, hf.max_position_embeddings)
    if args.rollout_max_context_len is None:
        args.rollout_max_context_len = hf.max_position_embeddings


def _check_lengths(args: Namespace, limit: int) -> None:
    """Lengths fit into the model's context of `limit` tokens."""
    what = f"the model's context of {limit} tokens (max_position_embeddings in config.json)"
    for dest in ("rollout_max_context_len", "eval_max_context_len"):
        value = getattr(args, dest)
        require(value is None or value <= limit, f"{flag_name(dest)} {value} is longer than {what}")
    for dest, other in (("max_prompt_len", "response"), ("max_response_len", "prompt")):
        for dest_of in (f"rollout_{dest}", f"eval_{dest}"):
            value = getattr(args, dest_of)
            whole = args.rollout_max_context_len == value == limit  # a response may fill what its prompt leaves
            require(
                value is None or value < limit or whole,
                f"{flag_name(dest_of)} {value} leaves no room for a {other} in {what}",
            )


def _same(value: Any, expected: Any) -> bool:
    if isinstance(expected, float) and not isinstance(value, bool):
        return abs(float(value) - expected) <= 1e-6 * abs(expected)
    return bool(value == expected)
