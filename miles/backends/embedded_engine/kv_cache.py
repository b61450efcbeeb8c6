"""Keys and values of the running requests: one tensor per length class, one row per request, no holes.

A request's row lies in the smallest class that holds its length, and moves to the next one (four times as long) when
it outgrows it, so a token's data is copied about once in its life and padding is bounded. Rows 0 .. n-1 of a class are
in use, so a decode step reads a slice, and nothing is gathered or padded again.

The bound: the allocated rows times their lengths, over all classes, never exceed `max_total_tokens`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from miles.backends.embedded_engine.request import Request

SHORTEST_CLASS = 64
CLASS_GROWTH = 4
FIRST_ROWS = 8


@dataclass(frozen=True)
class KVShape:
    """The shape of one token's keys and values in the whole model."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class LengthClass:
    """The rows of all requests of up to `length` tokens.

    `data` is [layer, key or value, row, kv head, position, head dim].
    """

    def __init__(self, shape: KVShape, length: int) -> None:
        self._shape = shape
        self.length = length
        self.requests: list[Request] = []
        """The request in each row; `requests[i].row == i`, except between `free` and `compact`."""
        self._holes: list[int] = []
        self.capacity = 0
        self.data = self._allocate(0)
        self.layers = self._layer_views()
        """Per layer (keys, values), each [rows * kv_heads * length, head_dim]: a view for writing single positions."""

    def _allocate(self, rows: int) -> torch.Tensor:
        s = self._shape
        shape = (s.layers, 2, rows, s.kv_heads, self.length, s.head_dim)
        # Zeros, not empty: positions that are masked out are still multiplied by 0, which a stray NaN would survive.
        if s.device.type != "cpu" or rows == 0:
            return torch.zeros(shape, dtype=s.dtype, device=s.device)
        # numpy's zeros are untouched memory until they are written, torch's are not.
        flat = np.zeros(math.prod(shape) * s.dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(flat).view(s.dtype).view(shape)

    def _layer_views(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(kv[0].view(-1, self._shape.head_dim), kv[1].view(-1, self._shape.head_dim)) for kv in self.data]

    @property
    def tokens(self) -> int:
        """Allocated size in tokens."""
        return self.capacity * self.length

    @property
    def used(self) -> int:
        """Rows that requests hold."""
        return len(self.requests) - len(self._holes)

    @property
    def is_full(self) -> bool:
        return self.used >= self.capacity

    def resize(self, rows: int) -> None:
        """Allocate `rows` rows (at least those in use), keeping what is in them."""
        self.compact()
        data = self._allocate(rows)
        used = len(self.requests)
        if used:
            longest = min(max(request.num_tokens for request in self.requests), self.length)
            data[:, :, :used, :, :longest] = self.data[:, :, :used, :, :longest]
        self.data, self.capacity = data, rows
        self.layers = self._layer_views()

    def join(self, request: Request) -> None:
        """Give `request` a row; there must be one."""
        assert not self.is_full
        if self._holes:
            request.row = self._holes.pop()
            self.requests[request.row] = request
        else:
            request.row = len(self.requests)
            self.requests.append(request)
        request.pool = self

    def free(self, row: int) -> None:
        """Take the row back; `compact` must run before the next step."""
        self._holes.append(row)

    @torch.inference_mode()
    def compact(self) -> None:
        """Fill the holes with the last rows, in one copy."""
        if not self._holes:
            return
        holes = set(self._holes)
        used = len(self.requests) - len(holes)
        sources = [row for row in range(used, len(self.requests)) if row not in holes]
        targets = [row for row in sorted(holes) if row < used]
        if sources:
            longest = max(self.requests[row].num_tokens for row in sources)
            device = self.data.device
            data = self.data[..., : min(longest, self.length), :]
            data.index_copy_(
                2,
                torch.tensor(targets, device=device),
                data.index_select(2, torch.tensor(sources, device=device)),
            )
            for source, target in zip(sources, targets, strict=True):
                moved = self.requests[source]
                self.requests[target] = moved
                moved.row = target
        del self.requests[used:]
        self._holes.clear()


class KVCache:
    """All length classes of one engine. Only the engine thread uses it."""

    def __init__(self, shape: KVShape, *, context_length: int, max_total_tokens: int) -> None:
        lengths = [SHORTEST_CLASS]
        while lengths[-1] < context_length:
            lengths.append(lengths[-1] * CLASS_GROWTH)
        lengths[-1] = min(lengths[-1], max(context_length, SHORTEST_CLASS))
        if max_total_tokens < lengths[-1]:
            raise ValueError(
                f"--max-total-tokens must be at least {lengths[-1]} so that one request of the context length "
                f"({context_length}) fits, got {max_total_tokens}; lower --context-length or raise it"
            )
        self.max_total_tokens = max_total_tokens
        self.classes = [LengthClass(shape, length) for length in lengths]

    @property
    def running(self) -> int:
        return sum(pool.used for pool in self.classes)

    @property
    def allocated_tokens(self) -> int:
        return sum(pool.tokens for pool in self.classes)

    def join(self, request: Request) -> bool:
        """Give `request` a row for its tokens; returns False, and changes nothing, where the memory is used up."""
        pool = self._class_for(request.num_tokens)
        if pool.is_full and not self._grow(pool):
            return False
        pool.join(request)
        return True

    def leave(self, request: Request) -> None:
        """Give the row of `request` back."""
        assert request.pool is not None
        request.pool.free(request.row)
        request.pool, request.row = None, -1

    def promote(self, request: Request) -> bool:
        """Move a request that has outgrown its class to the next one; False where the memory is used up."""
        old = request.pool
        assert old is not None
        new = self._class_for(request.num_tokens)
        if new.is_full and not self._grow(new):
            return False
        row = request.row  # read after growing, which may have moved it
        new.join(request)
        new.data[:, :, request.row, :, : old.length] = old.data[:, :, row]
        old.free(row)
        return True

    def outgrown(self) -> list[Request]:
        """Running requests whose next token does not fit in their row."""
        return [
            request
            for pool in self.classes[:-1]
            for row, request in enumerate(pool.requests)
            if request.pool is pool and request.row == row and request.num_tokens > pool.length
        ]

    def compact(self) -> None:
        for pool in self.classes:
            pool.compact()

    def trim(self) -> None:
        """Free the rows that nobody uses."""
        for pool in self.classes:
            if pool.used < pool.capacity:
                pool.resize(pool.used)

    def _class_for(self, tokens: int) -> LengthClass:
        return next(pool for pool in self.classes if tokens <= pool.length)

    def _grow(self, pool: LengthClass) -> bool:
        """Make room for at least one more row; doubles where that fits in the bound."""
        if self._free_rows(pool) < 1:
            self.trim()
        rows = min(max(FIRST_ROWS, pool.capacity), self._free_rows(pool))
        if rows < 1:
            return False
        pool.resize(pool.capacity + rows)
        return True

    def _free_rows(self, pool: LengthClass) -> int:
        return (self.max_total_tokens - self.allocated_tokens) // pool.length
