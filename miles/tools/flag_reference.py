"""Write `docs/reference/flags.md` from the flags themselves.

python -m miles.tools.flag_reference            rewrite the page
python -m miles.tools.flag_reference --check    exit with 1 where the page is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.backends.sglang_utils.flags import router_flags, server_flags
from miles.utils.arguments import flag_modules
from miles.utils.flag_parser import FlagParser
from miles.utils.refused_flags import REFUSED_FAMILIES, REFUSED_FLAGS
from miles.utils.refused_values import REFUSED_VALUES

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "flags.md"
_PASSED_ON = ("sglang-router", "SGLang servers")

_INTRODUCTION = """\
# Flag reference

Written by `python -m miles.tools.flag_reference` from the flags themselves: do not edit this page.

`python train_async.py --help` prints the same, and `--check-config` checks a command line, prints the resolved
configuration and exits. A flag that is missing here is an error that names close matches; one that is known but not
available says why, and what to use instead. `--custom-config-path FILE.yaml` sets values over the command line.
"""


def render() -> str:
    """The page."""
    parser = FlagParser(prog="train_async.py")
    inert: dict[str, str] = {}
    for module in flag_modules():
        module.add_flags(parser)
        inert |= getattr(module, "NO_EFFECT", {})
    lines = [_INTRODUCTION]
    for group in parser._action_groups:
        if group.title in _PASSED_ON or not any(action.dest != "help" for action in group._group_actions):
            continue
        lines += [f"## {_capitalized(group.title or '')}", ""]
        if group.description:
            lines += [group.description, ""]
        lines += [*_table(group._group_actions, inert), ""]
    lines += [*_passed_on(), "", *_refused()]
    return "\n".join(lines) + "\n"


def _capitalized(title: str) -> str:
    return title[:1].upper() + title[1:]


def _table(actions: list[argparse.Action], inert: dict[str, str]) -> Iterator[str]:
    yield "| flag | default | meaning |"
    yield "|---|---|---|"
    for action in actions:
        if action.dest == "help":
            continue
        meaning = action.help or ""
        if action.dest in inert:
            meaning += f" **No effect here:** {inert[action.dest]}."
        if action.choices is not None:
            meaning += f" One of {', '.join(f'`{choice}`' for choice in action.choices)}."
        yield f"| {_names(action)} | {_default(action)} | {_cell(meaning)} |"


def _names(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        kind = getattr(action.type, "__name__", "str")
        value = " " + {"int": "INT", "float": "FLOAT", "json_value": "JSON"}.get(kind, "TEXT")
        value += " ..." if action.nargs in ("+", "*") else ""
        value = f" [{value.strip()}]" if action.nargs == "?" else value
    return ", ".join(f"`{name}{value}`" for name in action.option_strings)


def _default(action: argparse.Action) -> str:
    if action.required:
        return "required"
    if action.nargs == 0 or action.default is False:
        return "off"
    return "none" if action.default is None else f"`{_shown(action.default)}`"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%")


def _passed_on() -> Iterator[str]:
    yield "## Passed on to sglang-router"
    yield ""
    yield "`--router-NAME` is passed to the router that the run starts as `--NAME`; unset, sglang-router's own default"
    yield "holds. `python -m sglang_router.launch_router --help` explains them."
    yield ""
    yield ", ".join(f"`--router-{flag.names[0][2:]}`" for flag in router_flags())
    yield ""
    yield "## Passed on to SGLang servers"
    yield ""
    yield "`--sglang-NAME` is passed to each server as `--NAME`; unset, SGLang's own default holds. They have no effect"
    yield "with the embedded engine. `python -m sglang.launch_server --help` explains them."
    yield ""
    yield ", ".join(f"`--sglang-{flag.names[0][2:]}`" for flag in server_flags())


def _refused() -> Iterator[str]:
    yield "## Values that are not available"
    yield ""
    yield "| flag | why | instead |"
    yield "|---|---|---|"
    for row in REFUSED_VALUES:
        yield f"| `{row.flag}` | {_cell(row.reason)} | {_cell(row.instead)} |"
    yield ""
    yield "## Flags that are not available"
    yield ""
    yield "Known, so that a launch script gets an answer. The defaults stay on `args` for plug-ins that read them."
    yield ""
    yield "| flags | why | instead |"
    yield "|---|---|---|"
    for refusal in REFUSED_FLAGS:
        names = ", ".join(f"`{refused.flag}`" for refused in refusal.flags)
        yield f"| {names} | {_cell(refusal.reason)} | {_cell(refusal.instead)} |"
    for prefix, answer in REFUSED_FAMILIES.items():
        reason, _, instead = answer.partition(". Instead: ")
        yield f"| `{prefix}*` | {_cell(reason)} | {_cell(instead.removesuffix('.'))} |"


def main(argv: list[str] | None = None) -> int:
    """Write the page, or check it; returns the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="Only compare; exit with 1 on a difference.")
    page = render()
    if options.parse_args(argv).check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
            return 0
        sys.stderr.write(f"{PAGE} is out of date: run `python -m miles.tools.flag_reference`\n")
        return 1
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
