from __future__ import annotations

from argparse import Namespace
from dataclasses import fields

import pytest

from miles.utils.types import PrefixCacheInfo, Sample, SpecInfo


class CharTokenizer:
    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def finished_sample() -> Sample:
    return Sample(
        group_index=1,
        index=5,
        prompt="ab",
        tokens=[97, 98, 120, 121, 122],
        response="xyz",
        response_length=3,
        label="xyz",
        reward=1.0,
        loss_mask=[1, 0, 1],
        weight_versions=["3", "4"],
        rollout_log_probs=[-0.1, -0.2, -0.3],
        teacher_log_probs=[0.0, 0.0, 0.0],
        remove_sample=True,
        status=Sample.Status.COMPLETED,
        metadata={"level": 3},
        routing_key="k",
        non_generation_time=0.5,
        spec_info=SpecInfo(1, 2, 3, 4),
        prefix_cache_info=PrefixCacheInfo(2, 4),
    )


def test_dict_round_trip_keeps_every_field() -> None:
    sample = finished_sample()
    data = sample.to_dict()
    assert data["status"] == "completed"
    assert data["spec_info"] == {
        "spec_accept_token_num": 1,
        "spec_draft_token_num": 2,
        "spec_verify_ct": 3,
        "completion_token_num": 4,
    }
    assert Sample.from_dict(data) == sample


def test_from_dict_turns_unknown_keys_into_attributes() -> None:
    assert Sample.from_dict({"index": 3, "made_by": "a newer release"}).made_by == "a newer release"  # type: ignore[attr-defined]


def test_reset_for_retry_forgets_the_answer_and_keeps_the_question() -> None:
    sample = finished_sample()
    sample.reset_for_retry()
    kept = {"group_index": 1, "index": 5, "prompt": "ab", "label": "xyz", "metadata": {"level": 3}, "routing_key": "k"}
    expected = Sample(**kept, status=Sample.Status.ABORTED)  # type: ignore[arg-type]
    assert sample == expected


def test_reset_for_retry_shares_no_list_between_samples() -> None:
    first, second = finished_sample(), finished_sample()
    first.reset_for_retry()
    second.reset_for_retry()
    first.tokens.append(1)
    first.weight_versions.append("1")
    assert second.tokens == [] and second.weight_versions == []


@pytest.mark.parametrize(
    ("versions", "oldest"),
    [
        ([], None),
        (["default"], None),
        (["10", "9"], 9),
        (["default", "7"], 7),
        (["-1"], None),
        (["7a", "8"], 8),
        ([3, "4"], 3),
    ],
)
def test_oldest_weight_version_is_the_smallest_number(versions: list[str], oldest: int | None) -> None:
    assert Sample(weight_versions=versions).oldest_weight_version == oldest


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", "completed"), ("length", "truncated"), ("abort", "aborted"), ("something_new", "pending")],
)
def test_finish_reason_sets_the_status(reason: str, status: str) -> None:
    sample = Sample()
    sample.update_from_meta_info(Namespace(), {"finish_reason": {"type": reason}, "weight_version": "3"})
    assert sample.status.value == status
    assert sample.weight_versions == ["3"]


def test_spans_record_each_version_of_a_response_once_and_oldest_first() -> None:
    sample = Sample(weight_versions=["1"])
    spans = [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(["2", "3", "3"])]
    sample.update_from_meta_info(Namespace(), {"finish_reason": None, "weight_version": "3", "weight_versions": spans})
    assert sample.weight_versions == ["1", "2", "3"]


def test_speculative_counters_are_added_only_where_speculation_is_on() -> None:
    meta = {
        "finish_reason": {"type": "stop"},
        "spec_accept_token_num": 3,
        "spec_draft_token_num": 4,
        "spec_verify_ct": 2,
        "completion_tokens": 6,
        "cached_tokens": 1,
        "prompt_tokens": 4,
    }
    off, on = Sample(), Sample()
    off.update_from_meta_info(Namespace(), meta)
    on.update_from_meta_info(Namespace(sglang_speculative_algorithm="EAGLE"), meta)
    assert off.spec_info == SpecInfo()
    assert on.spec_info.spec_accept_rate == 0.75 and on.spec_info.spec_accept_length == 3.0
    assert on.prefix_cache_info.prefix_cache_hit_rate == 0.25


def test_strip_last_output_tokens_shortens_everything_that_is_per_token() -> None:
    sample = finished_sample()
    sample.strip_last_output_tokens(2, CharTokenizer())
    assert sample.tokens == [97, 98, 120] and sample.response == "x" and sample.response_length == 1
    assert sample.loss_mask == [1] and sample.rollout_log_probs == [-0.1]
    sample.validate()
    sample.strip_last_output_tokens(1, CharTokenizer())
    assert sample.response == "" and sample.tokens == [97, 98]
    with pytest.raises(ValueError, match="cannot strip 1 tokens from a response of 0"):
        sample.strip_last_output_tokens(1, CharTokenizer())


@pytest.mark.parametrize("name", ["loss_mask", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"])
def test_validate_names_the_sample_and_the_field_of_the_wrong_length(name: str) -> None:
    sample = finished_sample()
    setattr(sample, name, [0.0])
    with pytest.raises(ValueError, match=f"sample 5: {name} has 1 entries, response_length is 3"):
        sample.validate()


def test_reward_key_selects_an_entry_and_a_missing_one_names_the_sample() -> None:
    args = Namespace(reward_key="acc")
    assert Sample(reward={"acc": 0.5}).get_reward_value(args) == 0.5
    assert Sample(reward=0.5).get_reward_value(Namespace(reward_key=None)) == 0.5
    with pytest.raises(ValueError, match="--reward-key 'acc': sample 7"):
        Sample(index=7, reward=0.5).get_reward_value(args)


def test_fields_are_those_of_the_plug_in_interface_in_its_order() -> None:
    names = """
        group_index index prompt tokens multimodal_inputs multimodal_train_inputs response response_length label reward
        loss_mask weight_versions rollout_log_probs rollout_routed_experts rollout_indexer_topk remove_sample
        teacher_log_probs opd_reverse_kl status metadata generate_function_path train_metadata adapter reward_spec
        routing_key non_generation_time spec_info prefix_cache_info
        weight_version_spans
    """  # the last line: our own, after those of the interface
    assert [f.name for f in fields(Sample)] == names.split()


def answered(sample: Sample, count: int, **meta_info: object) -> None:
    """One engine response of `count` tokens."""
    sample.response_length += count
    sample.update_from_meta_info(Namespace(), {"finish_reason": {"type": "stop"}, **meta_info})


def test_each_response_token_is_told_the_version_that_wrote_it() -> None:
    sample = Sample()
    answered(
        sample,
        5,
        weight_versions=[{"version": "3", "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 5}],
        weight_version="4",
    )
    sample.response_length += 2  # what a tool returned
    answered(sample, 3, weight_version="5", output_token_logprobs=[[-0.1, 7, None]] * 3)
    assert sample.weight_version_spans == [[0, 2, "3"], [2, 5, "4"], [7, 10, "5"]]
    assert sample.token_weight_versions() == ["3"] * 2 + ["4"] * 3 + [None] * 2 + ["5"] * 3
    assert sample.weight_versions == ["3", "4", "5"]


def test_spans_are_right_where_the_length_is_set_after_the_meta_info() -> None:
    sample = Sample()
    sample.update_from_meta_info(Namespace(), {"weight_version": "1", "completion_tokens": 4})
    sample.response_length = 4
    assert sample.token_weight_versions() == ["1"] * 4


def test_a_response_without_tokens_or_version_has_no_span() -> None:
    sample = Sample()
    answered(sample, 0, weight_version="1", completion_tokens=0)
    answered(sample, 2, completion_tokens=2)
    assert sample.weight_version_spans == []


def test_spans_survive_a_round_trip_and_are_cut_and_reset_with_the_answer() -> None:
    sample = finished_sample()
    sample.weight_version_spans = [[0, 1, "3"], [1, 3, "4"]]
    assert Sample.from_dict(sample.to_dict()).weight_version_spans == [[0, 1, "3"], [1, 3, "4"]]
    sample.strip_last_output_tokens(1, Namespace(decode=lambda ids: "xy"))
    assert sample.weight_version_spans == [[0, 1, "3"], [1, 2, "4"]]
    sample.strip_last_output_tokens(1, Namespace(decode=lambda ids: "x"))
    assert sample.weight_version_spans == [[0, 1, "3"]]
    sample.reset_for_retry()
    assert sample.weight_version_spans == []


def test_spans_do_not_make_samples_different() -> None:
    assert Sample(weight_version_spans=[[0, 1, "3"]]) == Sample()
