from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from miles.utils import arguments
from tests.fast.utils.command_lines import CommandLine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from miles.utils.flag_parser import FlagParser


@pytest.fixture(scope="session")
def parser() -> FlagParser:
    """The parser without plug-ins: building it takes longer than parsing."""
    return arguments.build_parser()


@pytest.fixture(scope="session")
def build_parser(parser: FlagParser) -> Callable[..., FlagParser]:
    """`arguments.build_parser`, which builds anew only for a command line with plug-ins."""
    build = arguments.build_parser

    def build_or_reuse(add_custom_arguments: Any = None, argv: list[str] | None = None) -> FlagParser:
        plain = add_custom_arguments is None and not arguments._functions_with_flags(argv or [])
        return parser if plain else build(add_custom_arguments, argv)

    return build_or_reuse


@pytest.fixture
def plain_machine(build_parser: Callable[..., FlagParser], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, with the class-based rollout API switched on."""
    monkeypatch.setattr("miles.utils.arguments.cuda_device_present", lambda: False)
    monkeypatch.setattr("miles.utils.arguments.build_parser", build_parser)
    monkeypatch.setenv("MILES_EXPERIMENTAL_ROLLOUT_REFACTOR", "1")


@pytest.fixture
def command_line(tmp_path: Path, plain_machine: None) -> CommandLine:
    """A valid command line in a directory of its own, on a plain machine."""
    return CommandLine.create(tmp_path)
