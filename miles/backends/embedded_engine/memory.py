"""How many tokens of KV cache fit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from miles.backends.embedded_engine.kv_cache import SHORTEST_CLASS

if TYPE_CHECKING:
    from miles.backends.embedded_engine.kv_cache import KVShape

HOST_SHARE = 0.25
DEVICE_SHARE = 0.6


def default_total_tokens(shape: KVShape, *, context_length: int, max_running_requests: int) -> int:
    """KV cache size in tokens: every running request at full context length if that fits, else what does.

    One request of the full context length is always counted in, so that the server starts on a busy machine.
    """
    longest = max(context_length, SHORTEST_CLASS)
    if shape.device.type == "cuda":
        free = DEVICE_SHARE * torch.cuda.mem_get_info(shape.device)[0]
    else:
        free = HOST_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(longest, min(int(free / shape.bytes_per_token), longest * max_running_requests))
