"""Tokenizers and processors of a checkpoint, loaded without running any code that lies in it.

`transformers` is imported inside the functions. A checkpoint with a `tokenizer.json` is read by the generic fast
tokenizer, which needs no torch; anything else goes through AutoTokenizer with remote code switched off.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def load_tokenizer(name_or_path: str | None, chat_template_path: str | None = None, **kwargs: Any) -> Any:
    """The tokenizer of a checkpoint directory (or a hub name), with the chat template of `chat_template_path` if given.

    Raises ValueError where the directory has no tokenizer files or the template cannot be read.
    """
    if not name_or_path:
        raise ValueError("--hf-checkpoint is not set: the tokenizer is read from it")
    kwargs.pop("trust_remote_code", None)
    directory = Path(name_or_path)
    if directory.is_dir() and not any((directory / name).exists() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"--hf-checkpoint {name_or_path}: no tokenizer in this directory (looked for {', '.join(_TOKENIZER_FILES)})"
        )
    if (directory / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(name_or_path, **kwargs)
    else:
        tokenizer = _load_with_auto_class(name_or_path, **kwargs)
    if chat_template_path:
        tokenizer.chat_template = _read_chat_template(chat_template_path)
    return tokenizer


def _load_with_auto_class(name_or_path: str, **kwargs: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(f"--hf-checkpoint {name_or_path}: its tokenizer cannot be loaded: {error}") from error


def _read_chat_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--chat-template-path {path}: {error.strerror or error}") from error


def load_processor(name_or_path: str, **kwargs: Any) -> Any | None:
    """The multimodal processor of a checkpoint directory; None where the directory has none (a text-only model)."""
    if not any((Path(name_or_path) / name).exists() for name in _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor

    kwargs.pop("trust_remote_code", None)
    return AutoProcessor.from_pretrained(name_or_path, trust_remote_code=False, **kwargs)


def model_context_length(name_or_path: str | None) -> int | None:
    """`max_position_embeddings` of a checkpoint directory's config.json, in tokens; None where it is not stated.

    None too where the rotary embedding is scaled by a factor: engines then serve a longer context than that.
    """
    config_path = Path(name_or_path or "") / "config.json"
    if not name_or_path or not config_path.is_file():
        return None
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config_path}: not valid JSON: {error}") from error
    if "max_position_embeddings" not in config:
        config = config.get("text_config") or {}
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    length = config.get("max_position_embeddings")
    return None if not length or "factor" in scaling else int(length)


def encode_image_for_rollout_engine(image: Any) -> str:
    """A PIL image as a PNG data URI; a string (path, URL or data URI) as it is."""
    if isinstance(image, str):
        return image
    buffer = io.BytesIO()
    (image if image.mode in ("RGB", "RGBA", "L") else image.convert("RGB")).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
