"""What the kernel under the tests can do."""

from __future__ import annotations

import platform

TELLS_SIGNALS = tuple(int(part) for part in platform.release().split(".")[:2]) >= (6, 15)
"""Whether it tells which signal has killed a process that is not our child."""
