"""Whether Ray is shown a token: the rule, and who follows it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from miles.ray import token_auth

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home directory of a user who has a token."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    return tmp_path


def test_a_users_token_is_shown_unless_the_mode_is_given(home: Path) -> None:
    mine = {"HOME": str(home)}
    assert token_auth.auth_mode(mine) == "token"
    assert token_auth.auth_mode({**mine, "RAY_AUTH_MODE": "disabled"}) == "disabled"
    nobodys = {"HOME": str(home / ".ray")}
    assert token_auth.auth_mode(nobodys) is None, "left to Ray"
    assert token_auth.auth_mode({**nobodys, "RAY_AUTH_MODE": "token"}) == "token"
    assert token_auth.auth_mode({**nobodys, "RAY_AUTH_TOKEN": "0" * 64}) == "token"
    elsewhere = {**nobodys, "RAY_AUTH_TOKEN_PATH": str(home / ".ray" / "auth_token")}
    assert token_auth.auth_mode(elsewhere) == "token"


def test_ray_learns_the_mode_although_it_is_imported_already(home: Path) -> None:
    program = (
        "from ray._raylet import AuthenticationMode, get_authentication_mode as mode\n"
        "from miles.ray.token_auth import show_token_to_ray\n"
        "assert mode() == AuthenticationMode.DISABLED\n"
        "show_token_to_ray()\n"
        "assert mode() == AuthenticationMode.TOKEN\n"
    )
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own |= {"HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], env=own, check=True, timeout=50)
