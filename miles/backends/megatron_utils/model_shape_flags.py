"""Model-shape flags of launch scripts. They build nothing: config.json decides; a flag that disagrees is an error."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from miles.utils.flag_rules import require

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
)
_SWITCHES = (
    ("group_query_attention", "Heads share keys and values."),
    ("use_rotary_position_embeddings", "Positions are rotary embeddings."),
    ("swiglu", "The feed-forward layers are gated with SiLU."),
    ("disable_bias_linear", "Linear layers have no bias."),
    ("add_qkv_bias", "Query, key and value projections have a bias."),
    ("qk_layernorm", "Queries and keys are normalised."),
    ("untie_embeddings_and_output_weights", "The output layer has weights of its own."),
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
    group.add_argument("--seq-length", type=int, default=None, help="Length that Megatron allocates for. None: unset.")


def read_hf_config(directory: str) -> dict[str, Any]:
    """config.json of the checkpoint, after checking that the directory is one.

    Raises ValueError for a missing directory, config.json or tokenizer, and for a config.json that is not JSON.
    """
    require(
        os.path.isdir(directory),
        f"--hf-checkpoint: {directory!r} is not a directory (current directory: {os.getcwd()}). "
        "Download the model first, for example with `hf download NAME --local-dir DIRECTORY`",
    )
    path = os.path.join(directory, "config.json")
    require(os.path.isfile(path), f"--hf-checkpoint: {directory!r} has no config.json; it is not a model checkpoint")
    require(
        any(os.path.isfile(os.path.join(directory, name)) for name in TOKENIZER_FILES),
        f"--hf-checkpoint: {directory!r} has no tokenizer (none of {', '.join(TOKENIZER_FILES)})",
    )
    with open(path, encoding="utf-8") as file:
        try:
            config = json.load(file)
        except ValueError as error:
            raise ValueError(f"--hf-checkpoint: {path} is not valid JSON: {error}") from error
    require(isinstance(config, dict), f"--hf-checkpoint: {path} does not hold a JSON object")
    return dict(config)


def shape_of(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says about each shape flag, by dest. A dest that it does not decide is absent."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    model_type = config.get("model_type")
    shape = {
        "num_layers": config.get("num_hidden_layers"),
        "hidden_size": width,
        "ffn_hidden_size": config.get("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or (width // heads if width and heads else None),
        "vocab_size": config.get("vocab_size"),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "norm_epsilon": config.get("rms_norm_eps"),
        "rotary_base": rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        "rotary_percent": 1.0,
        "group_query_attention": (config.get("num_key_value_heads") or heads) != heads,
        "use_rotary_position_embeddings": True,
        "swiglu": config.get("hidden_act", "silu") == "silu",
        "disable_bias_linear": not config.get("mlp_bias", False),
        "add_qkv_bias": model_type == "qwen2" or bool(config.get("attention_bias", False)),
        "qk_layernorm": model_type == "qwen3",
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
    }
    return {dest: value for dest, value in shape.items() if value is not None}


def validate(args: Namespace) -> None:
    """Raise ValueError where a shape flag disagrees with config.json, or the context is longer than the model's."""
    config = read_hf_config(args.hf_checkpoint)
    shape = shape_of(config)
    for dest, expected in shape.items():
        value = getattr(args, dest)
        if value is None or _same(value, expected):
            continue
        flag = f"--{dest.replace('_', '-')}"
        given = flag if value is True else f"{flag} {value}"
        raise ValueError(
            f"{given} disagrees with {os.path.join(args.hf_checkpoint, 'config.json')}, which says {expected}. The "
            f"checkpoint decides the shape. Instead: drop {flag}"
        )
    limit = shape.get("max_position_embeddings")
    for dest in ("rollout_max_context_len", "eval_max_context_len"):
        value = getattr(args, dest)
        require(
            value is None or limit is None or value <= limit,
            f"--{dest.replace('_', '-')} {value} is longer than the model's context of {limit} tokens "
            "(max_position_embeddings in config.json)",
        )
    for dest in ("rollout_max_prompt_len", "eval_max_prompt_len"):
        value = getattr(args, dest)
        require(
            value is None or limit is None or value < limit,
            f"--{dest.replace('_', '-')} {value} leaves no room for a response in the model's context of {limit} "
            "tokens (max_position_embeddings in config.json)",
        )


def _same(value: Any, expected: Any) -> bool:
    if isinstance(expected, float) and not isinstance(value, bool):
        return abs(float(value) - expected) <= 1e-6 * abs(expected)
    return bool(value == expected)
