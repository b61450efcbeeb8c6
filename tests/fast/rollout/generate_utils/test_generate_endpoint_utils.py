from __future__ import annotations

import base64
from types import SimpleNamespace

import numpy as np
import pytest

from miles.rollout.generate_utils import (
    compute_prompt_ids_from_sample,
    compute_request_payload,
    compute_routing_headers,
    policy_uses_routing_key,
    router_url,
    update_sample_from_response,
)
from miles.rollout.generate_utils.attempts import AttemptLog
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer, make_args, response


def state(processor=None, **overrides):
    return SimpleNamespace(args=make_args(**overrides), tokenizer=CharTokenizer(), processor=processor)


def decoded(ids):
    return "".join(map(chr, ids))


def test_a_text_prompt_is_encoded_as_it_is():
    assert decoded(compute_prompt_ids_from_sample(state(), Sample(prompt="hi"))) == "hi"


def test_messages_go_through_the_chat_template_with_tools_and_arguments():
    sample = Sample(prompt=[{"role": "user", "content": "hi"}], metadata={"tools": [{}, {}]})
    with_kwargs = state(apply_chat_template_kwargs={"suffix": "!"})
    assert decoded(compute_prompt_ids_from_sample(with_kwargs, sample)) == "[2 tools]<user>hi<assistant>!"
    assert decoded(compute_prompt_ids_from_sample(state(), sample, tools=[{}])) == "[1 tools]<user>hi<assistant>"


def test_a_processor_makes_the_ids_of_a_multimodal_prompt_and_the_training_inputs():
    def processor(text, images):
        return {"input_ids": [[1, 2]], "attention_mask": [[1, 1]], "pixel_values": images}

    sample = Sample(prompt="hi", multimodal_inputs={"images": ["image"]})
    assert compute_prompt_ids_from_sample(state(processor), sample) == [1, 2]
    assert sample.multimodal_train_inputs == {"pixel_values": ["image"]}


@pytest.mark.parametrize(
    ("policy", "needs"),
    [("consistent_hashing", True), ("manual", True), ("cache_aware", False), (None, False)],
)
def test_two_router_policies_use_a_routing_key(policy, needs):
    args = make_args(sglang_router_policy=policy)
    assert policy_uses_routing_key(args) is needs
    headers = compute_routing_headers(args, Sample(routing_key="k"))
    assert headers == ({"X-SMG-Routing-Key": "k"} if needs else None)
    if needs:
        with pytest.raises(ValueError, match=f"{policy} needs a routing key, but sample 3"):
            compute_routing_headers(args, Sample(index=3))


@pytest.mark.parametrize(
    ("given", "context", "prompt", "sent"),
    [(8, None, 3, 8), (8, 20, 3, 8), (8, 10, 3, 7), (None, 10, 3, 7), (None, None, 3, None)],
)
def test_max_new_tokens_is_cut_to_what_the_context_has_left(given, context, prompt, sent):
    params = {"max_new_tokens": given, "temperature": 1.0}
    payload, status = compute_request_payload(make_args(rollout_max_context_len=context), [1] * prompt, params)
    assert payload["sampling_params"] == {"max_new_tokens": sent, "temperature": 1.0}
    assert status is None
    assert params["max_new_tokens"] == given


@pytest.mark.parametrize(("given", "context"), [(0, None), (-1, None), (8, 3), (8, 2)])
def test_nothing_left_ends_truncated_without_a_payload(given, context):
    args = make_args(rollout_max_context_len=context)
    assert compute_request_payload(args, [1, 2, 3], {"max_new_tokens": given}) == (None, Sample.Status.TRUNCATED)


def test_replay_data_is_asked_for_by_flag():
    args = make_args(use_rollout_routing_replay=True)
    payload, _ = compute_request_payload(args, [1], {"max_new_tokens": 1})
    assert (payload["return_routed_experts"], payload["return_indexer_topk"]) == (True, False)


def test_the_router_address_is_needed_and_ipv6_is_bracketed():
    assert router_url(make_args(sglang_router_ip="::1", sglang_router_port=9), "/x") == "http://[::1]:9/x"
    with pytest.raises(ValueError, match="--sglang-router-ip None"):
        router_url(make_args(sglang_router_ip=None))


async def update(sample, output, **keywords):
    await update_sample_from_response(make_args(), sample, {"input_ids": [1, 2]}, output, **keywords)
    sample.validate()
    return sample


async def test_whoever_watches_the_attempt_learns_which_engine_has_answered():
    log, sample = AttemptLog(1), Sample()
    output = response("a")
    output["meta_info"]["engine_url"] = "http://10.0.0.7:31000"
    await log.watch(sample, False, update_sample_from_response(make_args(), sample, {"input_ids": [1]}, output))
    assert [span.engines for span in log.take()] == [("http://10.0.0.7:31000",)]


async def test_the_loss_mask_starts_on_request_and_covers_what_is_there_already():
    sample = await update(Sample(), response("ab"))
    assert sample.loss_mask is None
    await update(sample, response("c"), update_loss_mask=True)
    assert sample.loss_mask == [1, 1, 1]


async def test_an_existing_loss_mask_grows():
    sample = Sample(tokens=[1, 2, 3], response="x", response_length=1, loss_mask=[0], rollout_log_probs=[-1.0])
    assert (await update(sample, response("ab"))).loss_mask == [0, 1, 1]


async def test_counters_add_up_over_calls():
    sample = await update(Sample(), response("a"))
    await update(sample, response("b"))
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (2, 6)
    assert sample.weight_versions == ["0", "0"]


async def test_tokens_without_log_probabilities_are_an_error():
    output = response("ab")
    del output["meta_info"]["output_token_logprobs"]
    with pytest.raises(ValueError, match=r"2 tokens without meta_info.output_token_logprobs"):
        await update(Sample(), output)


async def test_the_payload_is_not_shared_with_the_sample():
    ids = [1, 2]
    sample = Sample()
    await update_sample_from_response(make_args(), sample, {"input_ids": ids}, response("a"))
    sample.tokens.append(9)
    assert ids == [1, 2]


async def test_replay_data_is_read_by_flag():
    experts = np.arange(2 * 3 * 2, dtype=np.int32)  # 2 = len(tokens) - 1 positions, 3 layers, top 2
    encoded = base64.b64encode(experts.tobytes()).decode()
    args = make_args(use_rollout_routing_replay=True, num_layers=3, moe_router_topk=2)
    sample = Sample()
    await update_sample_from_response(args, sample, {"input_ids": [1, 2]}, response("a", routed_experts=encoded))
    assert sample.rollout_routed_experts.shape == (2, 3, 2)
    assert (sample.rollout_routed_experts.ravel() == experts).all()
    sample.validate()


@pytest.mark.parametrize("ids", [[1, 100], [-1, 5]])
def test_a_token_id_that_the_model_does_not_have_is_never_sent(ids: list[int]):
    args = make_args(engine_vocab_size=100)
    with pytest.raises(ValueError, match=r"token id (100|-1) is outside the model's vocabulary of 100"):
        compute_request_payload(args, ids, {"max_new_tokens": 1})
    for fine in ([0, 99], []):
        assert compute_request_payload(args, fine, {"max_new_tokens": 1})[0] is not None
