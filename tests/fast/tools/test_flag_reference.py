"""The generated flag reference."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from miles.tools import flag_reference, sglang_flags
from miles.utils.arguments import build_parser
from miles.utils.refused_flags import REFUSED_FLAGS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_committed_page_is_current():
    assert flag_reference.main(["--check"]) == 0, "run `python -m miles.tools.flag_reference`"


def test_the_page_names_every_flag():
    page = flag_reference.render()
    missing = [action.option_strings[0] for action in build_parser().actions() if action.option_strings[0] not in page]
    assert missing == []
    assert all(refusal.reason in page and refusal.instead in page for refusal in REFUSED_FLAGS)


def test_a_page_that_differs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(flag_reference, "PAGE", tmp_path / "reference" / "flags.md")
    assert flag_reference.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert flag_reference.main([]) == 0
    assert flag_reference.main(["--check"]) == 0


def test_pass_through_flags_are_read_from_a_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", "-s", "--width", type=int)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--sizes", type=float, nargs="+")
    parser.add_argument("--maybe", nargs="?")
    parser.add_argument("--both", action=argparse.BooleanOptionalAction)
    assert list(sglang_flags.rows(parser)) == [
        ("--size|--width", "size", "value", "int"),
        ("--fast", "fast", "switch", "str"),
        ("--sizes", "sizes", "list", "float"),
        ("--maybe", "maybe", "optional", "str"),
        ("--both|--no-both", "both", "boolean", "str"),
    ]
