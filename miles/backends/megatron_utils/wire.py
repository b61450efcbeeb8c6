"""Weights on their way out: small gathered pieces become large buckets, while the bucket before is being sent.

    gather -> piece, piece, ... --copied and cast--> buffer A | buffer B --> bucket, to be sent as one run of bytes
    (1/16 of max_bytes)     |                        (used in turn)
                            +---large, on a CPU--> as they are ----------> bucket, to be sent one by one

On a GPU copying is nearly free, and one run of bytes travels fastest. On a CPU copying costs as much as sending: there
large tensors that are contiguous and of the right type are sent from where they are.

Every bucket costs a call to each engine, some milliseconds, so buckets are as large as memory allows. Beside the model
it is under two times `max_bytes`, one of which is left for a gathered tensor of that size. Two buffers have 7/16 each.
With tensors as they are, two buffers have 2/16 each, and the bucket that is sent and the one that is being collected
5/16 each. A tensor that is larger than a buffer travels alone, with nothing collected beside it; one larger than
`max_bytes` counts as a bucket itself.
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
_BUFFER_SHARE_BESIDE_LOOSE, _LOOSE_SHARE = 2 / 16, 5 / 16
LARGE_BYTES = 1024**2
"""From here on a broadcast of its own is as fast as a share of a larger one."""


@dataclass(frozen=True)
class TensorPlace:
    """One tensor within a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket's run of bytes."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WireBucket:
    """Tensors that travel together. Its memory is used again for the bucket after the next one."""

    places: tuple[TensorPlace, ...]
    data: torch.Tensor | None = None
    """[bytes] uint8, all tensors behind each other; None where they travel as they are."""
    loose: tuple[torch.Tensor, ...] = ()

    @property
    def names(self) -> list[str]:
        return [place.name for place in self.places]

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self.places)

    @property
    def device(self) -> torch.device:
        return self.tensors()[0].device

    def tensors(self) -> list[torch.Tensor]:
        """Each tensor; as bytes where it does not lie on a boundary of its type."""
        if self.data is None:
            return list(self.loose)
        return [self._view(self.data, place) for place in self.places]

    @staticmethod
    def _view(data: torch.Tensor, place: TensorPlace) -> torch.Tensor:
        own = data[place.offset : place.offset + place.nbytes]
        aligned = place.offset % place.dtype.itemsize == 0
        return own.view(place.dtype).view(place.shape) if aligned else own


class WirePacker:
    """Packs pieces into buckets; a tensor of any size is at most a bucket of its own."""

    def __init__(
        self, max_bytes: int, *, dtype: torch.dtype | None = None, loose_from_bytes: int | None = None
    ) -> None:
        """`dtype`: what weights are cast to, the engines' number format; None: they keep their own.

        `loose_from_bytes`: tensors of this size or more travel as they are; None: every tensor is packed.
        """
        buffer_share = _BUFFER_SHARE if loose_from_bytes is None else _BUFFER_SHARE_BESIDE_LOOSE
        self._buffer_bytes = max(1, int(max_bytes * buffer_share))
        self._loose_bytes = max(1, int(max_bytes * _LOOSE_SHARE))
        self._dtype = dtype
        self._loose_from_bytes = loose_from_bytes
        self._lent: list[torch.Tensor] = []

    @staticmethod
    def piece_bytes(max_bytes: int) -> int:
        """How much a gather should yield at a time."""
        return max(1, max_bytes // _PIECES_PER_BUCKET)

    def buckets(self, pieces: Iterable[Piece]) -> Iterator[WireBucket]:
        """Yields each bucket when it is complete. Asking for a bucket gives back the memory of the last but one."""
        filling: _Filling | None = None
        loose = _Loose()
        for name, tensor in _emptied(pieces):
            dtype = self._dtype or tensor.dtype
            nbytes = tensor.numel() * dtype.itemsize
            is_loose = self._stays_as_it_is(tensor, dtype)
            is_too_large = nbytes > (self._loose_bytes if is_loose else self._buffer_bytes)
            if loose.nbytes and (is_too_large or (is_loose and loose.nbytes + nbytes > self._loose_bytes)):
                yield loose.bucket()
                loose = _Loose()
            if filling is not None and (is_too_large or (not is_loose and not filling.has_room(nbytes))):
                yield filling.bucket()
                filling = None
            if is_too_large:
                self._lent.clear()  # one of them is still being sent; it lives until that is over
                yield _alone(name, tensor, dtype)
                continue
            if is_loose:
                loose.add(name, tensor.detach())
                continue
            if filling is None:
                filling = _Filling(self._buffer(tensor.device))
            filling.add(name, tensor, dtype)
        if loose.nbytes:
            yield loose.bucket()
        if filling is not None:
            yield filling.bucket()

    def _stays_as_it_is(self, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        return (
            self._loose_from_bytes is not None
            and tensor.nbytes >= self._loose_from_bytes
            and tensor.dtype == dtype
            and tensor.is_contiguous()
        )

    def _buffer(self, device: torch.device) -> torch.Tensor:
        """The buffer that was lent before the last one, or a new one."""
        if len(self._lent) < 2:
            buffer = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=device)
        else:
            buffer = self._lent.pop(0)
        self._lent.append(buffer)
        return buffer


def _emptied(pieces: Iterable[Piece]) -> Iterator[NamedTensor]:
    """The tensors of each piece, which is let go of one by one and not as a whole."""
    for piece in pieces:
        while piece:
            yield piece.pop(0)


@dataclass
class _Loose:
    """Tensors that travel as they are."""

    named: list[NamedTensor] = field(default_factory=list)
    nbytes: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.named.append((name, tensor))
        self.nbytes += tensor.nbytes

    def bucket(self) -> WireBucket:
        places = []
        offset = 0
        for name, tensor in self.named:
            places.append(TensorPlace(name, tensor.dtype, tuple(tensor.shape), offset))
            offset += tensor.nbytes
        return WireBucket(tuple(places), loose=tuple(tensor for _, tensor in self.named))


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
