"""What is evaluated and how: one frozen configuration per data set.

A value comes from the data set's own entry, else from `defaults` of the `--eval-config` file, else from the
`--eval-*` flag, else from the `--rollout-*` flag.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping


@dataclass(frozen=True)
class EvalDatasetConfig:
    """One data set to evaluate. None means: not set, the engine's or the data set reader's default holds."""

    name: str
    path: str
    rm_type: str | None = None
    input_key: str = "input"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = "metadata"
    n_samples_per_eval_prompt: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """What decides the prompts: data sets with equal keys have the same ones."""
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key)

    def inject_metadata(self, metadata: Any) -> dict[str, Any]:
        """A copy of a sample's metadata with this data set's `rm_type` and overrides in it."""
        merged = dict(metadata) if isinstance(metadata, dict) else {}
        if self.rm_type is not None:
            merged["rm_type"] = self.rm_type
        return {**merged, **self.metadata_overrides}


# For each field: the flags (dests) that give its value, the first that is set.
_FLAGS: dict[str, tuple[str, ...]] = {
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "min_new_tokens": ("eval_min_new_tokens",),
}
_FIELDS = {f.name for f in fields(EvalDatasetConfig)}


def resolve_eval_datasets(args: Namespace) -> list[EvalDatasetConfig]:
    """The data sets of `--eval-config`, or of `--eval-prompt-data NAME PATH ...`; an empty list where there are none.

    Raises ValueError for both flags at once, an unreadable file, an unknown key, a missing path and a name used twice.
    """
    config_path = getattr(args, "eval_config", None)
    pairs = getattr(args, "eval_prompt_data", None)
    if config_path and pairs:
        raise ValueError(f"--eval-config {config_path} and --eval-prompt-data {pairs} exclude each other: set one")
    if config_path:
        defaults, entries = _read_config_file(config_path)
    else:
        defaults, entries = {}, _entries_of_flag(pairs or [])
    configs = [_resolve(args, defaults, entry) for entry in entries]
    names = [config.name for config in configs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"evaluation data sets need different names; used more than once: {', '.join(repeated)}")
    return configs


def _entries_of_flag(pairs: list[str]) -> list[dict[str, Any]]:
    if len(pairs) == 1:
        return [{"name": Path(pairs[0].partition("@[")[0]).stem, "path": pairs[0]}]
    if len(pairs) % 2:
        raise ValueError(f"--eval-prompt-data takes NAME PATH pairs, got {len(pairs)} values: {' '.join(pairs)}")
    return [{"name": name, "path": path} for name, path in zip(pairs[::2], pairs[1::2], strict=True)]


def _read_config_file(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--eval-config {path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"--eval-config {path}: not valid YAML: {error}") from error
    root = content.get("eval", content) if isinstance(content, dict) else None
    if not isinstance(root, dict) or "datasets" not in root:
        raise ValueError(f"--eval-config {path}: expected a mapping with 'datasets' (and 'defaults'), or 'eval:' of it")
    datasets = root["datasets"]
    if isinstance(datasets, dict):
        datasets = [{"name": name, **(entry or {})} for name, entry in datasets.items()]
    if not isinstance(datasets, list) or not all(isinstance(entry, dict) for entry in datasets):
        raise ValueError(f"--eval-config {path}: 'datasets' must be a list of mappings or a mapping by name")
    return root.get("defaults") or {}, datasets


def _resolve(args: Namespace, defaults: Mapping[str, Any], entry: Mapping[str, Any]) -> EvalDatasetConfig:
    name = entry.get("name")
    unknown = sorted((set(entry) | set(defaults)) - _FIELDS)
    if unknown:
        raise ValueError(
            f"evaluation data set {name}: unknown {', '.join(unknown)}; known: {', '.join(sorted(_FIELDS))}"
        )
    for key in ("name", "path"):
        if not entry.get(key):
            raise ValueError(f"evaluation data set {name or dict(entry)}: {key!r} is missing")
    values = {**_flag_values(args), **_set_values(defaults), **_set_values(entry)}
    config = EvalDatasetConfig(**values)
    for key in ("temperature", "top_p"):
        value = getattr(config, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"evaluation data set {name}: {key} must be a finite number, got {value!r}")
    if config.n_samples_per_eval_prompt < 1:
        raise ValueError(
            f"evaluation data set {name}: n_samples_per_eval_prompt must be at least 1, "
            f"got {config.n_samples_per_eval_prompt}"
        )
    return config


def _flag_values(args: Namespace) -> dict[str, Any]:
    values = {}
    for key, flags in _FLAGS.items():
        found = [value for flag in flags if (value := getattr(args, flag, None)) is not None]
        if found:
            values[key] = found[0]
    return values


def _set_values(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}
