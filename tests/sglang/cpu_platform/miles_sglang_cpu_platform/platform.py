"""The platform class; a module of its own, since SGLang's classes cannot be imported yet when the plug-in is loaded."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum


class TorchCpuPlatform(CpuSRTPlatform):
    """SGLang's CPU operations under the name of an out-of-tree platform."""

    _enum = PlatformEnum.OOT
