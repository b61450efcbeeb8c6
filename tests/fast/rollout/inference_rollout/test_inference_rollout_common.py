from __future__ import annotations

import asyncio
from argparse import Namespace

import pytest

from miles.rollout.base_types import GenerateFnOutput
from miles.rollout.generate_hub import single_turn
from miles.rollout.inference_rollout.inference_rollout_common import (
    GenerateState,
    compute_sampling_params,
    generate_and_rm,
    generate_and_rm_group,
    max_concurrent_samples,
)
from miles.rollout.rm_hub.validation import RewardError
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer, EngineStub, make_args

COMPLETED, ABORTED, PENDING = Sample.Status.COMPLETED, Sample.Status.ABORTED, Sample.Status.PENDING
PARAMS = {"max_new_tokens": 8, "stop": ["a"]}


def state_with(generate, **overrides) -> GenerateState:
    state = GenerateState(make_args(**overrides))
    state.generate_function = generate
    return state


async def complete(input):
    input.sample.response, input.sample.status = "ok", COMPLETED
    return GenerateFnOutput(input.sample)


@pytest.fixture
def reward():
    """A reward function that records its calls: 1.0 for a sample, the positions for a list."""
    calls = []

    async def fn(args, samples, **kwargs):
        calls.append(samples)
        return [float(i) for i in range(len(samples))] if isinstance(samples, list) else 1.0

    fn.calls = calls
    with function_registry.temporary("test:reward", fn):
        yield fn


def make_group(n: int = 2) -> list[Sample]:
    return [Sample(group_index=0, index=i, prompt="q") for i in range(n)]


# GenerateState


def test_state_is_built_from_the_flags_of_a_small_namespace():
    state = GenerateState(
        Namespace(
            rollout_global_dataset=True,
            rollout_batch_size=4,
            n_samples_per_prompt=2,
            max_weight_staleness=None,
            async_max_concurrent_samples=None,
            dynamic_sampling_filter_path=None,
            rollout_sample_filter_path=None,
            sglang_router_ip="127.0.0.1",
            sglang_router_port=30000,
        )
    )
    assert state.generate_function is single_turn.generate
    assert not state.aborted


@pytest.mark.parametrize(
    ("concurrency", "gpus", "per_engine", "slots"),
    [(512, 8, 2, 2048), (3, 1, 2, 1), (1, 1, 8, 1), (512, None, 1, 512), (7, None, 4, 7)],
)
def test_slots_are_the_concurrency_of_all_engines(concurrency, gpus, per_engine, slots):
    args = make_args(
        sglang_server_concurrency=concurrency, rollout_num_gpus=gpus, rollout_num_gpus_per_engine=per_engine
    )
    assert max_concurrent_samples(args) == slots


def test_sampling_params_hold_exactly_the_contract_keys():
    args = make_args(rollout_stop=["\n"], rollout_stop_token_ids=[7], rollout_skip_special_tokens=True)
    assert compute_sampling_params(args, temperature=0.5, top_p=0.9, top_k=3, max_new_tokens=8) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "max_new_tokens": 8,
        "stop": ["\n"],
        "stop_token_ids": [7],
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    assert GenerateState(args).sampling_params["max_new_tokens"] == args.rollout_max_response_len


def test_states_are_separate():
    one, two = GenerateState(make_args()), GenerateState(make_args())
    one.aborted = True
    assert one.generate_fn_semaphore is not two.generate_fn_semaphore
    assert not two.aborted
    one.reset()
    assert not one.aborted


# generate_and_rm


async def test_a_sample_is_generated_then_rewarded(reward):
    state = state_with(complete, custom_rm_path="test:reward")
    sample = await generate_and_rm(state, Sample(), PARAMS)
    assert (sample.response, sample.reward, sample.status) == ("ok", 1.0, COMPLETED)


async def test_a_reward_that_the_generate_function_set_is_kept(reward):
    async def generate(input):
        input.sample.reward, input.sample.status = 0.25, COMPLETED
        return GenerateFnOutput(input.sample)

    sample = await generate_and_rm(state_with(generate, custom_rm_path="test:reward"), Sample(), PARAMS)
    assert sample.reward == 0.25
    assert reward.calls == []


async def test_a_finished_sample_comes_back_untouched():
    async def generate(input):
        raise AssertionError("must not be called")

    sample = Sample(status=Sample.Status.TRUNCATED, reward=0.0, response="r")
    assert await generate_and_rm(state_with(generate), sample, PARAMS) is sample
    with pytest.raises(ValueError, match="sample 4 is completed but has no reward"):
        await generate_and_rm(state_with(generate), Sample(index=4, status=COMPLETED), PARAMS)
    with pytest.raises(ValueError, match="cannot be continued"):
        await generate_and_rm(state_with(generate), [Sample(status=ABORTED)], PARAMS)


async def test_the_generate_function_gets_a_private_copy_of_the_sampling_params(reward):
    async def generate(input):
        input.sampling_params["max_new_tokens"] = 1
        input.sampling_params["stop"].append("b")
        return await complete(input)

    params = {"max_new_tokens": 8, "stop": ["a"]}
    await generate_and_rm(state_with(generate, custom_rm_path="test:reward"), Sample(), params)
    assert params == {"max_new_tokens": 8, "stop": ["a"]}


async def test_an_aborted_state_turns_waiting_samples_back_without_generating():
    state = state_with(complete)
    state.aborted = True
    sample = await generate_and_rm(state, Sample(), PARAMS)
    assert (sample.status, sample.reward, sample.response) == (ABORTED, None, "")


async def test_an_aborted_answer_is_not_rewarded(reward):
    async def generate(input):
        input.sample.status = ABORTED
        return GenerateFnOutput([input.sample, Sample(status=COMPLETED)])

    result = await generate_and_rm(state_with(generate, custom_rm_path="test:reward"), Sample(), PARAMS)
    assert [s.reward for s in result] == [None, None]
    assert reward.calls == []


async def test_several_samples_of_one_prompt_are_rewarded_in_one_call_where_they_need_it(reward):
    async def generate(input):
        return GenerateFnOutput([Sample(status=COMPLETED, reward=r) for r in (None, 9.0, None)])

    result = await generate_and_rm(state_with(generate, custom_rm_path="test:reward"), Sample(), PARAMS)
    assert [s.reward for s in result] == [0.0, 9.0, 1.0]
    assert len(reward.calls) == 1


async def test_earlier_tokens_are_masked_when_a_partial_answer_goes_on_off_policy(reward):
    flags = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True, "custom_rm_path": "test:reward"}
    partial = Sample(status=ABORTED, response="ab", response_length=2, tokens=[1, 2, 3])
    assert (await generate_and_rm(state_with(complete, **flags), partial, PARAMS)).loss_mask == [0, 0]
    assert (await generate_and_rm(state_with(complete, **flags), Sample(), PARAMS)).loss_mask is None


async def test_a_sample_may_name_its_own_generate_function(reward):
    async def own(args, sample, sampling_params):
        sample.response, sample.status = "own", COMPLETED
        return sample

    state = state_with(complete, custom_rm_path="test:reward")
    with function_registry.temporary("test:own", own):
        sample = await generate_and_rm(state, Sample(generate_function_path="test:own"), PARAMS)
    assert sample.response == "own"


async def test_slots_bound_generation_but_not_rewards_and_busy_covers_them():
    active, peak, rewarding = 0, 0, asyncio.Event()

    async def generate(input):
        nonlocal active, peak
        active += 1
        peak = max(peak, active)
        assert input.state.busy.active == active
        await asyncio.sleep(0)
        active -= 1
        return await complete(input)

    waiting = 0

    async def slow_reward(args, sample):
        nonlocal waiting
        waiting += 1
        if waiting == 6:
            rewarding.set()
        await rewarding.wait()
        return 1.0

    state = state_with(generate, sglang_server_concurrency=2, custom_rm_path="test:slow")
    with function_registry.temporary("test:slow", slow_reward):
        await asyncio.gather(*(generate_and_rm(state, Sample(), PARAMS) for _ in range(6)))
    assert peak == 2
    assert state.busy.active == 0
    assert state.busy.drain()


# generate_and_rm_group


async def test_a_group_keeps_its_order_and_length(reward):
    group = make_group(3)
    result = await generate_and_rm_group(state_with(complete, custom_rm_path="test:reward"), group, PARAMS)
    assert result == group
    assert all(a is b for a, b in zip(result, group, strict=True))


async def test_a_member_may_become_several_samples(reward):
    async def generate(input):
        if input.sample.index == 0:
            return GenerateFnOutput([Sample(status=COMPLETED), Sample(status=COMPLETED)])
        return await complete(input)

    result = await generate_and_rm_group(state_with(generate, custom_rm_path="test:reward"), make_group(), PARAMS)
    assert [isinstance(member, list) for member in result] == [True, False]


async def test_a_failing_sample_cancels_and_settles_its_siblings_and_its_own_error_is_raised():
    started, settled = asyncio.Event(), []
    error = LookupError("plug-in")

    async def generate(input):
        if input.sample.index == 1:
            await started.wait()
            raise error
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            settled.append(input.sample.index)

    state = state_with(generate)
    with pytest.raises(LookupError) as raised:
        await generate_and_rm_group(state, make_group(), PARAMS)
    assert raised.value is error
    assert settled == [0]
    assert state.busy.active == 0
    assert not state.generate_fn_semaphore.locked()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_failing_reward_fails_the_group_too():
    async def failing(args, sample):
        raise LookupError("reward")

    with function_registry.temporary("test:failing", failing), pytest.raises(LookupError, match="reward"):
        await generate_and_rm_group(state_with(complete, custom_rm_path="test:failing"), make_group(), PARAMS)


async def test_an_aborted_state_returns_the_group_at_once():
    state, group = state_with(complete), make_group()
    state.aborted = True
    assert await generate_and_rm_group(state, group, PARAMS) is group
    assert [s.status for s in group] == [PENDING, PENDING]


@pytest.mark.parametrize("policy", ["consistent_hashing", "manual"])
async def test_routing_keys_are_given_where_the_policy_needs_them_and_kept_where_they_exist(policy, reward):
    group = make_group()
    group[0].routing_key = "mine"
    await generate_and_rm_group(
        state_with(complete, sglang_router_policy=policy, custom_rm_path="test:reward"), group, PARAMS
    )
    assert group[0].routing_key == "mine"
    assert len(group[1].routing_key) == 36

    other = make_group()
    state = state_with(complete, sglang_router_policy="round_robin", custom_rm_path="test:reward")
    await generate_and_rm_group(state, other, PARAMS)
    assert other[0].routing_key is None


async def test_deterministic_mode_gives_each_sample_its_own_seed(reward):
    seeds = {}

    async def generate(input):
        seeds[input.sample.index] = input.sampling_params.get("sampling_seed")
        return await complete(input)

    flags = {"sglang_enable_deterministic_inference": True, "rollout_seed": 7, "custom_rm_path": "test:reward"}
    await generate_and_rm_group(state_with(generate, **flags), make_group(), PARAMS)
    assert seeds == {0: 7, 1: 8}
    assert "sampling_seed" not in PARAMS


async def test_group_rm_rewards_the_whole_group_once(reward):
    state = state_with(complete, group_rm=True, custom_rm_path="test:reward")
    group = await generate_and_rm_group(state, make_group(3), PARAMS)
    assert [s.reward for s in group] == [0.0, 1.0, 2.0]
    assert len(reward.calls) == 1


async def test_group_rm_leaves_a_group_with_an_aborted_sample_alone(reward):
    async def generate(input):
        input.sample.status = ABORTED if input.sample.index else COMPLETED
        return GenerateFnOutput(input.sample)

    state = state_with(generate, group_rm=True, custom_rm_path="test:reward")
    group = await generate_and_rm_group(state, make_group(), PARAMS)
    assert [s.reward for s in group] == [None, None]


async def test_a_group_over_http(reward):
    async with EngineStub() as engine:
        state = GenerateState(engine.args(custom_rm_path="test:reward"))
        state.tokenizer, state.processor = CharTokenizer(), None
        group = await generate_and_rm_group(state, make_group(), state.sampling_params)
    assert [s.response for s in group] == ["ok", "ok"]
    assert [s.tokens for s in group] == [[ord(c) for c in "qok"]] * 2
    assert [s.reward for s in group] == [1.0, 1.0]
    assert [r["input_ids"] for r in engine.requests] == [[ord("q")]] * 2


# Rewards that the generate function sets


def rewarding(*rewards, several: bool = False):
    async def set_reward(input):
        sample = input.sample
        sample.response, sample.status, sample.reward = "ok", COMPLETED, rewards[0]
        others = [Sample(index=sample.index, response="ok", status=COMPLETED, reward=r) for r in rewards[1:]]
        return GenerateFnOutput([sample, *others] if several else sample)

    return set_reward


@pytest.mark.parametrize("reward_value", [float("nan"), "good", 10**400, 10**5000, float("inf"), object()], ids=type)
@pytest.mark.parametrize("several", [False, True])
async def test_a_reward_that_the_generate_function_sets_is_checked(reward_value, several, reward):
    generate = rewarding(1.0, reward_value, several=True) if several else rewarding(reward_value)
    state = state_with(generate, custom_rm_path="test:reward")
    with pytest.raises(
        RewardError, match=r"generate function .*set_reward returned .* for sample 3: expected a finite"
    ):
        await generate_and_rm(state, Sample(group_index=1, index=3), PARAMS)
    assert reward.calls == []


async def test_a_missing_reward_of_a_generate_function_takes_the_sample_out_by_flag(reward):
    state = state_with(rewarding(float("nan")), custom_rm_path="test:reward", missing_reward="remove")
    sample = await generate_and_rm(state, Sample(group_index=1, index=3), PARAMS)
    assert (sample.reward, sample.remove_sample, state.missing_rewards) == (0.0, True, 1)


async def test_a_failed_sample_is_not_rewarded(reward):
    async def fail(input):
        input.sample.status = Sample.Status.FAILED
        return GenerateFnOutput(input.sample)

    state = state_with(fail, custom_rm_path="test:reward", sample_max_retries=0)
    sample = await generate_and_rm(state, Sample(group_index=1, index=3), PARAMS)
    assert (sample.status, sample.reward, reward.calls) == (Sample.Status.FAILED, None, [])
