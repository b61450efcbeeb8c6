"""Memory for broadcasts from a sender that may send something else than it announced.

Weights stay where they were received, and the memory of the ones that they replace receives the next ones: an update
touches no fresh memory, which on a CPU takes several times as long as the copy into it.
"""

from __future__ import annotations

import mmap
import sys
from collections import deque

import torch

LARGEST_ITEM = 8
"""Bytes of the largest number that a sender could hold: float64."""
_MARK = 0xFF
"""All ones is a NaN in every weight type, so no usable weight looks like an untouched mark."""
_MARK_BYTES = 4
_REFERENCES_WHEN_FREE = 2
"""Of a mapping that is taken out of the pool's queue: a variable, and the question itself."""
_REFERENCES_IN_A_LOOP = 3
"""Of one that is still in the queue: that, a variable, and the question itself."""
_POOLED_BYTES = 1024**2
"""Smaller memory is not worth keeping."""


class MemoryPool:
    """Host memory that is used again once nothing refers to it. Used from one thread.

    A tensor and all views of it keep the mapping behind it alive, so that its references tell whether it is free: no
    one has to give it back, and it cannot be written to while a model, a snapshot or a checksum still looks at it.
    """

    def __init__(self) -> None:
        self._mappings: dict[int, deque[mmap.mmap]] = {}
        """By size: buckets have the same sizes in every update. The one that was taken longest ago comes first."""
        self._used: set[int] = set()

    def take(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 with any content. What nothing is written to costs no physical memory."""
        if nbytes < _POOLED_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        mappings = self._mappings.setdefault(nbytes, deque())
        mapping = mappings.popleft() if mappings else None
        if mapping is not None and sys.getrefcount(mapping) != _REFERENCES_WHEN_FREE:
            mappings.appendleft(mapping)  # those behind it were taken later, and are in use even more likely
            mapping = None
        if mapping is None:
            mapping = mmap.mmap(-1, nbytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        mappings.append(mapping)
        self._used.add(id(mapping))
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def trim(self) -> None:
        """Let go of what is free and was not taken since the last call."""
        used, self._used = self._used, set()
        self._mappings = {
            size: kept
            for size, mappings in self._mappings.items()
            if (kept := deque(m for m in mappings if id(m) in used or sys.getrefcount(m) > _REFERENCES_IN_A_LOOP))
        }

    @property
    def nbytes(self) -> int:
        """Address space that is held; how much of it is physical depends on what was written."""
        return sum(size * len(mappings) for size, mappings in self._mappings.items())


class ReceiveBuffer:
    """`received` tells whether exactly the announced bytes have arrived.

    gloo ends the whole process where more arrives than fits, so the room is larger than announced: enough for the same
    tensors in any type. Marks on both sides of the announced end show how far the data went. NCCL takes the announced
    size for granted; its buffer has no more than that.
    """

    def __init__(
        self, numel: int, nbytes: int, *, device: torch.device | str, roomy: bool, pool: MemoryPool | None = None
    ) -> None:
        self._nbytes = nbytes
        self._roomy = roomy
        room = max(nbytes, numel * LARGEST_ITEM) if roomy else nbytes
        on_host = torch.device(device).type == "cpu"
        self.memory = (
            pool.take(room) if pool is not None and on_host else torch.empty(room, dtype=torch.uint8, device=device)
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
