"""SGLang on a CPU without its CPU kernel package, through SGLang's own mechanism for out-of-tree platforms.

SGLang takes the kernel package for granted on the platform that it calls CPU. A platform from outside with the same
operations uses plain torch instead. Chosen with SGLANG_PLATFORM=miles_cpu; nothing of the computation is faked.
"""

from __future__ import annotations

import torch

_SCHEMA = "{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[torch.library.Library] = []  # declarations end with the object that made them


def activate() -> str:
    """Called by SGLang: the dotted name of the platform's class.

    Also declares two operators that torchvision, which is built for CUDA, cannot register beside a CPU torch and yet
    names when it is imported. They are never called.
    """
    if not _libraries:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(_SCHEMA.format(name=name))
        _libraries.append(library)
    return f"{__name__}.platform.TorchCpuPlatform"
