"""The argument parser: mistakes are ValueErrors, unknown flags get close matches, and it knows what the user set."""

from __future__ import annotations

import argparse
import difflib
from argparse import SUPPRESS, Namespace
from typing import Any, NoReturn


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations whose `parse` returns the values and which of them were given."""

    def __init__(self, prog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            allow_abbrev=False,
            description="Train a language model with reinforcement learning.",
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=120),
        )

        self.plugin_flags: frozenset[str] = frozenset()
        """Flags that plug-ins declared, which may replace ones that miles knows but refuses."""
        self.refused_flags: frozenset[str] = frozenset()
        """Flags that are known but not available: nobody is pointed to them."""
        self.refused_families: dict[str, str] = {}
        """What such flags begin with that are refused without a list of them -> why, and what to do instead."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage of several hundred flags and exiting."""
        raise ValueError(message)

    def format_usage(self) -> str:
        """One line: the full usage would be pages long."""
        return f"usage: {self.prog} --hf-checkpoint DIRECTORY --rollout-batch-size N ... (see --help)\n"

    def actions(self) -> list[argparse.Action]:
        """Every declared flag, in order."""
        return [action for action in self._actions if action.dest not in ("help",)]

    def float_dests(self) -> list[str]:
        """The dests of all flags that take floats, but for those of plug-ins."""
        return [
            action.dest
            for action in self.actions()
            if action.type is float and self.plugin_flags.isdisjoint(action.option_strings)
        ]

    def action_for(self, dest: str) -> argparse.Action | None:
        """The flag with this dest."""
        return next((action for action in self.actions() if action.dest == dest), None)

    def defaults(self) -> dict[str, Any]:
        """The default of each dest, with text converted as if it came from the command line."""
        values: dict[str, Any] = {}
        for action in self.actions():
            default = action.default
            if isinstance(default, str) and callable(action.type):
                default = action.type(default)
            if default is not SUPPRESS:
                values[action.dest] = default
        return values

    def parse(self, argv: list[str]) -> tuple[Namespace, frozenset[str]]:
        """(all values, the dests that `argv` sets).

        Raises ValueError for a missing or malformed value and for unknown flags, naming close ones.
        """
        args, given, mistakes = self.read(argv)
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return args, given

    def read(self, argv: list[str]) -> tuple[Namespace, frozenset[str], list[str]]:
        """(all values, the dests that `argv` sets, a line for each unknown flag and each required one that is missing).

        Raises ValueError for a malformed value.
        """
        defaults = self.defaults()
        saved = [(action, action.default, action.required) for action in self._actions]
        for action in self._actions:
            action.default, action.required = SUPPRESS, False
        try:
            given, rest = self.parse_known_args(argv)
        except argparse.ArgumentError as error:
            raise ValueError(str(error)) from error
        finally:
            for action, default, required in saved:
                action.default, action.required = default, required
        mistakes = self._describe_unknown(rest) if rest else []
        missing = [action for action in self._actions if action.required and not hasattr(given, action.dest)]
        mistakes += [_missing(action) for action in missing]
        return Namespace(**{**defaults, **vars(given)}), frozenset(vars(given)), mistakes

    def _describe_unknown(self, rest: list[str]) -> list[str]:
        """A line for each flag that does not exist, or one for values that belong to no flag."""
        lines = []
        for word in rest:
            if not word.startswith("--"):
                continue
            name = word.split("=", 1)[0]
            family = next((prefix for prefix in self.refused_families if name.startswith(prefix)), None)
            if family is not None:
                lines.append(f"{name} is not available: {self.refused_families[family]}")
                continue
            close = self.close_matches(name)
            hint = f"did you mean {' or '.join(close)}?" if close else "see --help for the flags that exist"
            lines.append(f"unknown flag {name}; {hint}")
        return lines or [f"these values belong to no flag: {' '.join(rest)}"]

    def close_matches(self, name: str) -> list[str]:
        """Up to three available flags: ones that look like `name`, or of which one goes on where the other ends."""
        names = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        known = [option for option in names if option not in self.refused_flags]
        alike = difflib.get_close_matches(name, known, n=3, cutoff=0.8)
        longer = sorted((option for option in known if option.startswith(f"{name}-")), key=len)
        shorter = sorted((option for option in known if name.startswith(f"{option}-")), key=len, reverse=True)
        return list(dict.fromkeys([*alike, *shorter, *longer]))[:3]

    def check_type(self, dest: str, value: Any, source: str) -> Any:
        """`value`, from `source`, as the flag with this dest takes it; ValueError where it does not."""
        action = self.action_for(dest)
        if action is None or (value is None and action.default is None and not action.required):
            return value
        flag = action.option_strings[0]
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise ValueError(f"{source}: {dest} ({flag}) must be true or false, got {value!r}")
            return value
        if action.nargs in ("+", "*") or isinstance(action.nargs, int):
            if not isinstance(value, list):
                raise ValueError(f"{source}: {dest} ({flag}) must be a list, got {value!r}")
            return [self._check_one(action, item, f"{source}: {dest} ({flag})") for item in value]
        return self._check_one(action, value, f"{source}: {dest} ({flag})")

    @staticmethod
    def _check_one(action: argparse.Action, value: Any, where: str) -> Any:
        expected = action.type
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if expected is float and isinstance(value, str):
            try:
                value = float(value)  # YAML 1.1 reads 1e-6 as text
            except ValueError:
                raise ValueError(f"{where} must be a number, got {value!r}") from None
        if expected in (int, float, str):
            if not isinstance(value, expected) or isinstance(value, bool):
                raise ValueError(f"{where} must be {_TYPE_NAMES[expected]}, got {value!r}")
        elif callable(expected) and isinstance(value, str):
            value = expected(value)
        if action.choices is not None and value not in action.choices:
            raise ValueError(f"{where} must be one of {', '.join(map(str, action.choices))}, got {value!r}")
        return value


def _missing(action: argparse.Action) -> str:
    what = (action.help or "").removesuffix("Required.").rstrip().removesuffix(".")
    return f"{action.option_strings[0]} is required: {what}"


_TYPE_NAMES: dict[Any, str] = {int: "an integer", float: "a number", str: "text"}
