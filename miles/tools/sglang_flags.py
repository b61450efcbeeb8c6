"""Write the list of server flags that an installed SGLang has, so that launch scripts are checked without importing it.

    python -m miles.tools.sglang_flags > miles/backends/sglang_utils/server_flags.tsv      # needs SGLang installed
    python -m miles.tools.sglang_flags --router > miles/backends/sglang_utils/router_flags.tsv    # needs sglang-router

One flag a line: its names (joined by |), dest, kind (switch, boolean, value, list or optional), value type.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER = ("sglang.srt.server_args", "ServerArgs", "sglang")
ROUTER = ("sglang_router.router_args", "RouterArgs", "sglang-router")


def rows(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str, str]]:
    """(names, dest, kind, type) of each optional flag of `parser`, in its order."""
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if not names or names == ["--help"]:
            continue
        kind_of_value = action.type.__name__ if action.type in (int, float) else "str"
        yield "|".join(names), action.dest, _kind(action), kind_of_value


def _kind(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "boolean"
    if action.nargs == 0:
        return "switch"
    if action.nargs in ("*", "+"):
        return "list"
    return "optional" if action.nargs == "?" else "value"


def main(argv: list[str] | None = None) -> None:
    """Write the list to standard output."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--router", action="store_true", help="List sglang-router's flags instead of SGLang's.")
    module, name, distribution = ROUTER if options.parse_args(argv).router else SERVER
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    getattr(importlib.import_module(module), name).add_cli_args(parser)
    lines = [f"# {distribution} {importlib.metadata.version(distribution)}: names, dest, kind, type"]
    lines += ["\t".join(row) for row in rows(parser)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
