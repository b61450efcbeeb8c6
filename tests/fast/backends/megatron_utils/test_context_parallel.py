"""Which tokens of a packed row each context-parallel rank has."""

from __future__ import annotations

import pytest

from miles.backends.megatron_utils.context_parallel import shard_positions


def test_a_rank_has_an_early_and_a_late_piece_of_every_sequence() -> None:
    assert shard_positions([8, 4], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert shard_positions([8, 4], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_have_the_whole_row_and_equal_work(ranks: int) -> None:
    lengths = [16, 8, 24]
    parts = [shard_positions(lengths, rank, ranks).tolist() for rank in range(ranks)]
    assert sorted(place for part in parts for place in part) == list(range(48))
    starts = {place: 0 if place < 16 else 16 if place < 24 else 24 for place in range(48)}
    seen = [sum(place - starts[place] + 1 for place in part) for part in parts]
    assert len(set(seen)) == 1, "tokens that causal attention looks at"
