"""Does this process show Ray a token? One rule for driver and `ray start`, the one of `ray start --head`.

    RAY_AUTH_MODE is set                                       -> that
    not, and the user has a token (RAY_AUTH_TOKEN,
    the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)         -> token
    neither                                                    -> Ray's default

`ray start --head` follows it by itself (Ray 2.60). `ray start --address`, `ray job submit`, and `ray.init` with an
address do not, and a head that wants a token turns them away. A cluster that wants none ignores it.

As a program it prints the mode, or nothing: the scripts in examples/ export that. It needs the standard library alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MODE = "RAY_AUTH_MODE"


def auth_mode(environment: Mapping[str, str]) -> str | None:
    """The mode by the rule above; None leaves it to Ray."""
    if environment.get(MODE):
        return environment[MODE]
    if environment.get("RAY_AUTH_TOKEN"):
        return "token"
    file = environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(file) if file else Path(environment.get("HOME") or Path.home()) / ".ray" / "auth_token"
    return "token" if path.is_file() else None


def show_token_to_ray() -> None:
    """Apply the rule to this process, before it joins a cluster."""
    mode = auth_mode(os.environ)
    if mode is None or os.environ.get(MODE) == mode:
        return
    os.environ[MODE] = mode
    from ray._raylet import Config

    Config.initialize("")  # Ray has read the environment when it was imported


if __name__ == "__main__":
    sys.stdout.write(auth_mode(os.environ) or "")
