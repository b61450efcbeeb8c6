from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.backends.training_utils.packing import pack


def test_two_lists_without_padding() -> None:
    packed = pack([[5, 6, 7], [8, 9]])
    assert packed.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.cu_seqlens.tolist() == [0, 3, 5]
    assert packed.total_lengths == (3, 2)
    assert packed.max_seqlen == 3


def test_padding_is_a_sequence_of_its_own() -> None:
    packed = pack([[5, 6, 7], [8, 9]], pad_multiple=8)
    assert packed.tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert packed.total_lengths == (3, 2)


@given(
    st.lists(st.lists(st.integers(min_value=0, max_value=200_000), min_size=1, max_size=20), min_size=1, max_size=10),
    st.integers(min_value=1, max_value=16),
)
def test_unpacking_gives_the_lists_back(token_lists: list[list[int]], pad_multiple: int) -> None:
    packed = pack(token_lists, pad_multiple)
    assert [row.tolist() for row in packed.unpack()] == token_lists
    assert packed.tokens.shape[1] % pad_multiple == 0
    assert packed.tokens.shape == packed.position_ids.shape
    assert packed.cu_seqlens[-1] == packed.tokens.shape[1]
    assert packed.max_seqlen == packed.cu_seqlens.diff().max()


@pytest.mark.parametrize(
    ("lists", "multiple", "message"),
    [([], 1, "empty micro-batch"), ([[1], []], 1, "sample 1"), ([[1]], 0, "--data-pad-size-multiplier")],
)
def test_bad_input_is_refused(lists: list[list[int]], multiple: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(lists, multiple)
