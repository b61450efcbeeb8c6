"""Memory for one broadcast from a sender that may send something else than it announced."""

from __future__ import annotations

import torch

LARGEST_ITEM = 8
"""Bytes of the largest number that a sender could hold: float64."""
_MARK = 0xFF
"""All ones is a NaN in every weight type, so no usable weight looks like an untouched mark."""
_MARK_BYTES = 4


class ReceiveBuffer:
    """`received` tells whether exactly the announced bytes have arrived.

    gloo ends the whole process where more arrives than fits, so the room is larger than announced: enough for the same
    tensors in any type. Marks on both sides of the announced end show how far the data went. NCCL takes the announced
    size for granted; its buffer has no more than that.
    """

    def __init__(self, numel: int, nbytes: int, *, device: torch.device | str, roomy: bool) -> None:
        self._nbytes = nbytes
        self._roomy = roomy
        self.memory = torch.empty(
            max(nbytes, numel * LARGEST_ITEM) if roomy else nbytes, dtype=torch.uint8, device=device
        )
        """[bytes] uint8: hand all of it to the broadcast. What nothing is written to costs no physical memory."""
        if roomy:
            self.memory[max(0, nbytes - _MARK_BYTES) : nbytes + _MARK_BYTES] = _MARK

    def received(self) -> torch.Tensor:
        """[nbytes] uint8, once the broadcast is over. Raises ValueError where more or fewer bytes came."""
        data, beyond = self.memory[: self._nbytes], self.memory[self._nbytes : self._nbytes + _MARK_BYTES]
        if self._roomy and (beyond != _MARK).any():
            raise ValueError(f"more than the announced {self._nbytes} bytes were sent; is a dtype wrong")
        if self._roomy and data.numel() and (data[-_MARK_BYTES:] == _MARK).all():
            raise ValueError(f"fewer than the announced {self._nbytes} bytes were sent, or NaN; is a dtype wrong")
        return data
