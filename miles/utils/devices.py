"""What the machine has, found out without importing torch."""

from __future__ import annotations

import glob
import importlib.util
import os


def cuda_device_present() -> bool:
    """Whether this process can see an NVIDIA device (its device file exists and CUDA_VISIBLE_DEVICES hides it not)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return False
    return bool(glob.glob("/dev/nvidia[0-9]*")) or os.path.exists("/dev/dxg")


def sglang_installed() -> bool:
    """Whether SGLang can be imported; it is not."""
    return importlib.util.find_spec("sglang") is not None


def transformer_engine_installed() -> bool:
    """Whether there is a package of Transformer Engine; it is not imported."""
    return importlib.util.find_spec("transformer_engine") is not None
