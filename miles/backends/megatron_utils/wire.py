"""Weights on their way out: small gathered pieces become large flat buckets, while the bucket before is being sent.

    gather -> piece, piece, ... --copied and cast--> buffer A | buffer B --> bucket, to be sent as one run of bytes
    (1/16 of max_bytes)                              (7/16 of max_bytes each, used in turn)

Memory beside the model: two buffers and the piece at hand. A piece is one tensor where that is larger, at most a bucket
of `max_bytes`: together under two buckets. A tensor that is larger than a buffer travels alone, in its own memory; only
one that is larger than `max_bytes` takes more, and then less than twice its own size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NamedTensor = tuple[str, torch.Tensor]
Piece = list[NamedTensor]
"""What one step of a gather yields: names and full tensors. It is emptied by whoever takes it."""

_PIECES_PER_BUCKET = 16
_BUFFER_SHARE = 7 / 16


@dataclass(frozen=True)
class TensorPlace:
    """One tensor within a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WireBucket:
    """Tensors whose bytes lie behind each other. Its memory is used again for the bucket after the next one."""

    places: tuple[TensorPlace, ...]
    data: torch.Tensor
    """[bytes] uint8."""

    @property
    def names(self) -> list[str]:
        return [place.name for place in self.places]

    def tensors(self) -> list[torch.Tensor]:
        """One view for each tensor; of bytes where it does not lie on a boundary of its type."""
        return [self._view(place) for place in self.places]

    def _view(self, place: TensorPlace) -> torch.Tensor:
        data = self.data[place.offset : place.offset + place.nbytes]
        aligned = place.offset % place.dtype.itemsize == 0
        return data.view(place.dtype).view(place.shape) if aligned else data


class WirePacker:
    """Packs pieces into buckets; a tensor of any size is at most a bucket of its own."""

    def __init__(self, max_bytes: int, *, dtype: torch.dtype | None = None) -> None:
        """`dtype`: what weights are cast to, the engines' number format; None: they keep their own."""
        self._capacity = max(1, int(max_bytes * _BUFFER_SHARE))
        self._dtype = dtype
        self._lent: list[torch.Tensor] = []

    @staticmethod
    def piece_bytes(max_bytes: int) -> int:
        """How much a gather should yield at a time."""
        return max(1, max_bytes // _PIECES_PER_BUCKET)

    def buckets(self, pieces: Iterable[Piece]) -> Iterator[WireBucket]:
        """Yields each bucket when it is complete. Asking for a bucket gives back the memory of the last but one."""
        filling: _Filling | None = None
        for piece in pieces:
            while piece:
                name, tensor = piece.pop(0)
                dtype = self._dtype or tensor.dtype
                nbytes = tensor.numel() * dtype.itemsize
                if filling is not None and not filling.has_room(nbytes):
                    yield filling.bucket()
                    filling = None
                if nbytes > self._capacity:
                    self._drop_buffers()
                    yield _alone(name, tensor, dtype)
                    continue
                if filling is None:
                    filling = _Filling(self._buffer(tensor.device))
                filling.add(name, tensor, dtype)
                del tensor  # the piece is let go as it is copied, not as a whole
        if filling is not None:
            yield filling.bucket()

    def _buffer(self, device: torch.device) -> torch.Tensor:
        """The buffer that was lent before the last one, or a new one."""
        if len(self._lent) < 2:
            buffer = torch.empty(self._capacity, dtype=torch.uint8, device=device)
        else:
            buffer = self._lent.pop(0)
        self._lent.append(buffer)
        return buffer

    def _drop_buffers(self) -> None:
        """One of them is still being sent; it lives until that is over."""
        self._lent.clear()


@dataclass
class _Filling:
    buffer: torch.Tensor
    places: list[TensorPlace] = field(default_factory=list)
    used: int = 0

    def has_room(self, nbytes: int) -> bool:
        return self.used + nbytes <= self.buffer.numel()

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        place = TensorPlace(name, dtype, tuple(tensor.shape), self.used)
        target = self.buffer[self.used : self.used + place.nbytes]
        if self.used % dtype.itemsize == 0:
            target.view(dtype).view(tensor.shape).copy_(tensor.detach())
        else:
            target.copy_(tensor.detach().to(dtype).contiguous().view(-1).view(torch.uint8))
        self.places.append(place)
        self.used += place.nbytes

    def bucket(self) -> WireBucket:
        return WireBucket(tuple(self.places), self.buffer[: self.used])


def _alone(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> WireBucket:
    whole = tensor.detach().to(dtype).contiguous()
    return WireBucket((TensorPlace(name, dtype, tuple(tensor.shape), 0),), whole.view(-1).view(torch.uint8))


def pieces_of(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[Piece]:
    """Consecutive tensors grouped up to `max_bytes`; a larger tensor goes alone. Holds one group at a time."""
    piece: Piece = []
    size = 0
    for name, tensor in tensors:
        if piece and size + tensor.nbytes > max_bytes:
            yield piece
            piece, size = [], 0
        piece.append((name, tensor))
        size += tensor.nbytes
    if piece:
        yield piece
