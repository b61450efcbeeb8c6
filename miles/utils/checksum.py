"""A checksum of one tensor, equal wherever its values are equal: how trainer and engines compare weights."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def tensor_checksum(tensor: torch.Tensor) -> str:
    """16 hex digits over dtype, shape and the raw bytes of `tensor` (any device, any strides)."""
    import torch

    contiguous = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{contiguous.dtype}{tuple(contiguous.shape)}".encode(), digest_size=8)
    digest.update(contiguous.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
