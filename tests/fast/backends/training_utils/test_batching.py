from __future__ import annotations

from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.backends.training_utils.batching import first_fit, micro_batch_indices, optimizer_steps


def dynamic(max_tokens: int | None, **more: int) -> Namespace:
    return Namespace(use_dynamic_batch_size=True, max_tokens_per_gpu=max_tokens, micro_batch_size=1, **more)


def test_fixed_size_cuts_consecutive_slices() -> None:
    args = Namespace(micro_batch_size=2, use_dynamic_batch_size=False, max_tokens_per_gpu=None)
    assert micro_batch_indices(args, [9, 9, 9, 9, 9]) == [[0, 1], [2, 3], [4]]


def test_first_fit_fills_the_first_bin_with_room() -> None:
    # 3 -> bin 0 (3 of 6); 4 -> bin 1; 2 -> bin 0 (5 of 6); 5 -> bin 2; 1 -> bin 0 (6 of 6).
    assert first_fit([3, 4, 2, 5, 1], 6) == [[0, 2, 4], [1], [3]]


def test_dynamic_size_balances_the_first_fit_count() -> None:
    # First fit under 10: [6, 3], [5, 5]; so 2 micro-batches. Balanced: 6 + 3 = 9 and 5 + 5 = 10 fit as well.
    assert micro_batch_indices(dynamic(10), [6, 5, 3, 5]) in ([[0, 2], [1, 3]], [[0, 1], [2, 3]])


def test_context_parallel_multiplies_the_limit() -> None:
    assert len(micro_batch_indices(dynamic(4), [4, 4, 4, 4])) == 4
    assert len(micro_batch_indices(dynamic(4), [4, 4, 4, 4], cp_size=2)) == 2


def test_forward_only_takes_its_own_limit() -> None:
    args = dynamic(4, log_probs_max_tokens_per_gpu=16)
    assert len(micro_batch_indices(args, [4, 4, 4, 4], forward_only=True)) == 1


def test_the_rank_with_most_micro_batches_decides() -> None:
    assert len(micro_batch_indices(dynamic(100), [4, 4, 4, 4], max_over_dp=lambda count: max(count, 3))) == 3


def test_the_count_is_rounded_up_to_the_pipeline_group() -> None:
    assert len(micro_batch_indices(dynamic(8), [4] * 6, multiple_of=2)) == 4


def test_a_sample_above_the_limit_goes_alone() -> None:
    assert [7] in micro_batch_indices(dynamic(10), [5, 5, 5, 5, 5, 5, 5, 99])


@given(
    st.lists(st.integers(min_value=1, max_value=120), min_size=1, max_size=40),
    st.integers(min_value=1, max_value=200),
    st.integers(min_value=0, max_value=5),
)
def test_every_sample_once_and_no_micro_batch_above_the_limit(lengths: list[int], limit: int, more: int) -> None:
    def max_over_dp(count: int) -> int:
        return min(len(lengths), count + more)

    parts = micro_batch_indices(dynamic(limit), lengths, max_over_dp=max_over_dp)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(parts)
    assert len(parts) == max_over_dp(len(first_fit(lengths, limit)))
    assert all(len(part) == 1 or sum(lengths[i] for i in part) <= limit for part in parts)


def test_optimizer_steps_take_consecutive_local_samples() -> None:
    assert optimizer_steps(8, 8, 2) == [range(0, 4), range(4, 8)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: micro_batch_indices(dynamic(None), [1]), "needs --max-tokens-per-gpu"),
        (lambda: micro_batch_indices(dynamic(4), []), "empty list of samples"),
        (lambda: micro_batch_indices(dynamic(4), [1, 1], max_over_dp=lambda _: 3), "only 2 samples"),
        (
            lambda: micro_batch_indices(Namespace(micro_batch_size=0), [1]),
            "--micro-batch-size must be at least 1, got 0",
        ),
        (lambda: optimizer_steps(6, 8, 2), "--global-batch-size 8"),
        (lambda: optimizer_steps(6, 3, 2), "multiple of the data-parallel size 2, got 3"),
    ],
)
def test_bad_sizes_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_an_interleaved_pipeline_gets_a_multiple_of_its_size() -> None:
    args = Namespace(micro_batch_size=2, use_dynamic_batch_size=False, max_tokens_per_gpu=None)
    parts = micro_batch_indices(args, [9] * 5, multiple_of=2)
    assert len(parts) == 4 and sorted(i for part in parts for i in part) == list(range(5))
    with pytest.raises(ValueError, match=r"1 samples a step.*a multiple of 2 micro-batches"):
        micro_batch_indices(args, [9], multiple_of=2)
