from __future__ import annotations

from dataclasses import fields, make_dataclass

import pytest

from miles.rollout.generate_utils import sample_utils
from miles.rollout.generate_utils.sample_utils import merge_samples
from miles.utils.types import PrefixCacheInfo, Sample, SpecInfo
from tests.fast.rollout.engine_stub import CharTokenizer

COMPLETED, TRUNCATED = Sample.Status.COMPLETED, Sample.Status.TRUNCATED


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def turn(before: str, answer: str, **values) -> Sample:
    defaults = {"status": COMPLETED, "rollout_log_probs": [-1.0] * len(answer), "index": 3}
    return Sample(tokens=ids(before + answer), response=answer, response_length=len(answer), **{**defaults, **values})


def test_two_turns_become_one_sequence_with_the_observation_masked_out():
    a = turn("Q", "aa", weight_versions=["1"], reward=None, metadata={"x": 1}, non_generation_time=0.5)
    b = turn("Qaa[obs]", "b", weight_versions=["2"], reward=1.0, metadata={"y": 2}, non_generation_time=0.25)
    merged = merge_samples([a, b], CharTokenizer())
    merged.validate()
    assert merged.tokens == ids("Qaa[obs]b")
    assert merged.response == "aa[obs]b"
    assert merged.loss_mask == [1, 1, 0, 0, 0, 0, 0, 1]
    assert merged.rollout_log_probs == [-1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]
    assert merged.weight_versions == ["1", "2"]
    assert (merged.reward, merged.metadata, merged.non_generation_time) == (1.0, {"x": 1, "y": 2}, 0.75)


def test_three_turns_chain_and_counters_add_up():
    turns = [
        turn("Q", "a", spec_info=SpecInfo(1, 2, 3, 4), prefix_cache_info=PrefixCacheInfo(1, 2)),
        turn("Qa.", "b", spec_info=SpecInfo(1, 2, 3, 4), prefix_cache_info=PrefixCacheInfo(3, 4)),
        turn("Qa.b.", "c", loss_mask=[0]),
    ]
    merged = merge_samples(turns, CharTokenizer())
    assert merged.loss_mask == [1, 0, 1, 0, 0]
    assert merged.spec_info == SpecInfo(2, 4, 6, 8)
    assert merged.prefix_cache_info == PrefixCacheInfo(4, 6)


def test_one_turn_is_itself_and_none_is_an_error():
    only = turn("Q", "a")
    assert merge_samples([only], CharTokenizer()) is only
    with pytest.raises(ValueError, match="at least one sample"):
        merge_samples([], CharTokenizer())


def test_the_chain_ends_at_a_turn_that_is_not_completed():
    merged = merge_samples([turn("Q", "a", status=TRUNCATED), turn("Qa", "b")], CharTokenizer())
    assert (merged.response, merged.status) == ("a", TRUNCATED)


def test_the_chain_ends_where_replay_data_is_missing():
    merged = merge_samples([turn("Q", "a", rollout_routed_experts=[[1]]), turn("Qa", "b")], CharTokenizer())
    assert merged.response == "a"


def test_a_turn_that_does_not_go_on_from_the_one_before_is_an_error():
    with pytest.raises(ValueError, match="do not start with"):
        merge_samples([turn("Q", "a"), turn("X", "b")], CharTokenizer())
    with pytest.raises(ValueError, match="reaches into the turn before"):
        merge_samples([turn("Q", "aa"), turn("Q", "aa")], CharTokenizer())


def test_turns_must_agree_on_whose_answer_they_are():
    with pytest.raises(ValueError, match="disagree on label: 'x' and 'y'"):
        merge_samples([turn("Q", "a", label="x"), turn("Qa", "b", label="y")], CharTokenizer())
    with pytest.raises(ValueError, match="one turn has rollout_log_probs and another has none"):
        merge_samples([turn("Q", "a"), turn("Qa", "b", rollout_log_probs=None)], CharTokenizer())


def test_every_field_of_a_sample_has_a_merge_rule(monkeypatch):
    assert {f.name for f in fields(Sample)} == set(sample_utils._RULES)
    extended = make_dataclass("Extended", [("brand_new", int, 0)], bases=(Sample,))
    monkeypatch.setattr(sample_utils, "Sample", extended)
    with pytest.raises(AssertionError, match="brand_new"):
        merge_samples([turn("Q", "a"), turn("Qa", "b")], CharTokenizer())


def test_version_spans_move_with_the_turns():
    first = turn("Q", "aa", weight_version_spans=[[0, 1, "3"], [1, 2, "4"]])
    second = turn("Qaa..", "bbb", weight_version_spans=[[0, 3, "5"]])
    third = turn("Qaa..bbb.", "c", weight_version_spans=[[0, 1, "5"]])
    merged = merge_samples([first, second, third], CharTokenizer())
    assert merged.weight_version_spans == [[0, 1, "3"], [1, 2, "4"], [4, 7, "5"], [8, 9, "5"]]
    assert merged.token_weight_versions() == ["3", "4", None, None, "5", "5", "5", None, "5"]
