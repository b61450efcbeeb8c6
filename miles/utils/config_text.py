"""The resolved configuration as text: what --check-config prints."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

_SECRET = re.compile("wandb_key|api_key|password")
_OF_ONE_RUN = frozenset({"check_config", "run_dir"})
"""Not a part of the configuration: other values in each run."""


def check_report(args: Namespace, given: frozenset[str], defaults: Mapping[str, Any]) -> str:
    """The answer of --check-config: the values that were given or differ from the default, with `all` every one."""
    everything = args.check_config == "all"
    shown = {
        name: value
        for name, value in vars(args).items()
        if everything or (name not in _OF_ONE_RUN and (name in given or value != defaults.get(name)))
    }
    rest = "" if everything else "# Everything else has its default; --check-config all prints it too.\n"
    return f"{format_config(shown)}{rest}# OK: a run would start\n"


def format_config(values: Mapping[str, Any]) -> str:
    """The values as YAML, sorted by name; keys and passwords are not shown."""
    shown = {name: "(hidden)" if value and _SECRET.search(name) else _plain(value) for name, value in values.items()}
    return str(yaml.safe_dump(shown, sort_keys=True, width=1000))


def _plain(value: Any) -> Any:
    """`value` as YAML can write it; what it cannot is shown as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
