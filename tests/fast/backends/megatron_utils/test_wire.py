"""Pieces become buckets, byte for byte, in under two buckets of memory."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

from miles.backends.megatron_utils.safetensors_io import groups
from miles.backends.megatron_utils.wire import WirePacker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miles.backends.megatron_utils.wire import Piece, WireBucket

BUCKET = 3200


def rows(*sizes: int, dtype: torch.dtype = torch.uint8) -> list[tuple[str, torch.Tensor]]:
    return [(str(i), torch.full((n,), i, dtype=dtype)) for i, n in enumerate(sizes)]


def packed(tensors: list[tuple[str, torch.Tensor]], max_bytes: int = BUCKET) -> Iterator[WireBucket]:
    return WirePacker(max_bytes).buckets(groups(iter(tensors), WirePacker.piece_bytes(max_bytes)))


def test_pieces_fill_up_and_a_large_tensor_goes_alone() -> None:
    names = [[name for name, _ in piece] for piece in groups(rows(1, 2, 10, 1, 1, 1), 3)]
    assert names == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert list(groups([], 3)) == []


def test_buckets_hold_all_bytes_in_order_and_no_more_than_the_bound() -> None:
    tensors = rows(400, 900, 100, 700, 700, 1, 1600, 3000, 5)
    found: dict[str, bytes] = {}
    groups = []
    for bucket in packed(tensors):
        assert bucket.data is not None
        assert bucket.data.nbytes == bucket.nbytes
        assert bucket.data.nbytes <= BUCKET / 2 or len(bucket.places) == 1
        groups.append(bucket.names)
        found |= {
            place.name: bytes(bucket.data[place.offset : place.offset + place.nbytes].tolist())
            for place in bucket.places
        }
    assert groups == [["0", "1", "2"], ["3", "4"], ["5"], ["6"], ["7"], ["8"]]
    assert found == {name: bytes(t.tolist()) for name, t in tensors}


def test_numbers_are_cast_to_the_engines_format() -> None:
    (bucket,) = WirePacker(BUCKET, dtype=torch.bfloat16).buckets([[("a", torch.tensor([1.0, 1.0 + 2**-12]))]])
    assert bucket.places[0].dtype == torch.bfloat16
    assert torch.equal(bucket.tensors()[0], torch.ones(2, dtype=torch.bfloat16))


def test_a_tensor_off_its_boundary_is_still_whole() -> None:
    odd, number = torch.ones(3, dtype=torch.uint8), torch.tensor([[1.5, -2.0]])
    (bucket,) = packed([("odd", odd), ("number", number)])
    assert bucket.places[1].offset == 3 and bucket.data is not None
    assert torch.equal(bucket.data[3:].clone().view(torch.float32), number[0])
    assert bucket.tensors()[1].dtype == torch.uint8


def test_a_bucket_stays_as_it_is_while_the_next_one_is_packed() -> None:
    previous = None
    for bucket in packed(rows(*[1000] * 9)):
        assert bucket.data is not None
        if previous is not None:
            assert previous[0].tolist() == previous[1]
        previous = (bucket.data, bucket.data.tolist())


def test_strided_tensors_are_packed_by_value() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    (bucket,) = packed([("t", matrix.t())])
    assert torch.equal(bucket.tensors()[0], matrix.t())


def test_large_tensors_travel_as_they_are_where_copying_is_dear() -> None:
    """A cast or a strided one is packed all the same; nothing is lost between the two kinds of bucket."""
    large, strided = torch.ones(100), torch.arange(140.0).view(2, 70).t()
    tensors = [("a", large), ("b", torch.ones(3)), ("c", strided), ("d", torch.ones(100)), ("e", large.double())]
    packer = WirePacker(4800, dtype=torch.float32, loose_from_bytes=400)
    found = list(packer.buckets([list(tensors)]))
    assert [bucket.names for bucket in found] == [["b", "c"], ["a", "d"], ["e"]]
    assert found[1].tensors()[0].data_ptr() == large.data_ptr()
    assert [bucket.data is None for bucket in found] == [False, True, False]
    sent = {name: t for bucket in found for name, t in zip(bucket.names, bucket.tensors(), strict=True)}
    for name, tensor in tensors:
        assert torch.equal(sent[name], tensor.float()), name


def live_bytes() -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if _is_tensor(t)}
    return sum(storages.values())


def _is_tensor(thing: object) -> bool:
    return type(thing) is torch.Tensor


@pytest.fixture
def _only_new_objects() -> Iterator[None]:
    """`gc.get_objects` leaves out what exists already, which is a lot."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_only_new_objects")
@pytest.mark.parametrize("loose", [None, 1000, 5000])
@pytest.mark.parametrize("large", [0, 3_900, 9_900, 13_900, 31_000, 40_000])
def test_memory_stays_under_two_buckets(large: int, loose: int | None) -> None:
    """Where a tensor is larger than a bucket, it is the unit."""
    bucket_bytes = 32_000
    unit = max(bucket_bytes, large)
    most, base = 0, live_bytes()

    def gathering() -> Iterator[Piece]:
        nonlocal most
        for i in range(60):
            in_a_row = 6 if large < bucket_bytes / 2 else 1
            size = large if large and 10 <= i % 20 < 10 + in_a_row else 1500
            piece = [(str(i), torch.zeros(size, dtype=torch.uint8))]
            most = max(most, live_bytes() - base)
            yield piece

    for _ in WirePacker(bucket_bytes, loose_from_bytes=loose).buckets(gathering()):
        most = max(most, live_bytes() - base)
    assert bucket_bytes // 4 < most < 2 * unit
