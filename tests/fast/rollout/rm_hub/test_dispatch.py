import asyncio
import json
import subprocess
import sys
import threading
from argparse import Namespace

import pytest

from miles.rollout.rm_hub import async_rm, batched_async_rm, check_rm_type, known_rm_types, remote_rm
from miles.rollout.rm_hub.grading import close_grader
from miles.rollout.rm_hub.validation import RewardError
from miles.utils.misc import function_registry
from miles.utils.types import RewardSpec, Sample
from miles.utils.user_calls import THREAD_NAME
from tests.fast.utils.http_servers import Script, serve


def make_args(**fields):
    return Namespace(**{"rm_type": None, "custom_rm_path": None, "rm_url": None, "reward_key": None, **fields})


@pytest.fixture
def custom():
    """Registers a function as "custom" and returns args that name it."""
    contexts = []

    def register(fn, **fields):
        context = function_registry.temporary("custom", fn)
        context.__enter__()
        contexts.append(context)
        return make_args(custom_rm_path="custom", **fields)

    yield register
    for context in contexts:
        context.__exit__(None, None, None)


class TestTypes:
    @pytest.mark.parametrize(
        ("rm_type", "response", "label", "reward"),
        [
            ("math", r"\boxed{5}", "5", 1),
            ("deepscaler", r"</think>\boxed{5}", "5", 1),
            ("dapo", "Answer: 5", "5", {"score": 1.0, "acc": True, "pred": "5"}),
            ("f1", "red house", "red barn", 0.5),
            ("gpqa", "Answer: B", "B", 1.0),
            ("boxed_f1", r"long story \boxed{red barn}", "red barn", 1.0),
            ("boxed_f1", "red barn", "red barn", 0.0),
            (" f1 ", "red barn", "red barn", 1.0),
        ],
    )
    async def test_the_runs_type_rewards(self, rm_type, response, label, reward):
        assert await async_rm(make_args(rm_type=rm_type), Sample(response=response, label=label)) == reward

    async def test_a_sample_chooses_its_own(self):
        args = make_args(rm_type="unknown")
        fields = {"response": "Answer: B", "label": "B"}
        assert await async_rm(args, Sample(**fields, metadata={"rm_type": "gpqa"})) == 1.0
        assert await async_rm(args, Sample(**fields, reward_spec=RewardSpec(rm_type="gpqa"))) == 1.0
        both = Sample(**fields, reward_spec=RewardSpec(rm_type="gpqa"), metadata={"rm_type": "unknown"})
        assert await async_rm(args, both) == 1.0

    async def test_random_types(self):
        samples = [Sample(prompt="p", response=str(i)) for i in range(64)]
        assert {await async_rm(make_args(rm_type="random"), sample) for sample in samples} == {0, 1}
        first = await batched_async_rm(make_args(rm_type="deterministic_random"), samples)
        assert set(first) == {0, 1}
        assert await batched_async_rm(make_args(rm_type="deterministic_random"), samples) == first

    @pytest.mark.parametrize("rm_type", ["mathematics", "boxed_", "boxed_mathematics"])
    async def test_an_unknown_type_lists_the_known_ones(self, rm_type):
        with pytest.raises(
            ValueError, match=rf"--rm-type '{rm_type}' is unknown; known types: dapo, deepscaler.*remote_rm"
        ):
            await async_rm(make_args(rm_type=rm_type), Sample())

    async def test_no_type_at_all_says_what_to_set(self):
        with pytest.raises(ValueError, match="set --rm-type, --custom-rm-path"):
            await async_rm(make_args(), Sample())

    @pytest.mark.parametrize("rm_type", ["gemma_math", "ifbench", "boxed_ifbench"])
    def test_refused_types_say_why(self, rm_type):
        with pytest.raises(ValueError, match=rf"--rm-type {rm_type} is not available: .*--custom-rm-path"):
            check_rm_type(rm_type)

    def test_known_types_pass_the_check(self):
        for name in known_rm_types():
            check_rm_type(name)
            check_rm_type(f"boxed_{name}")


class TestRemote:
    async def test_posts_prompt_response_and_label(self):
        script = Script((200, "0.25"))
        async with serve(script) as url:
            args = make_args(rm_type="remote_rm", rm_url=f"{url}/reward")
            sample = Sample(prompt="p", response=r"r \boxed{b}", label="l")
            assert await async_rm(args, sample) == 0.25
            assert await remote_rm(args, sample) == 0.25
            args.rm_type = "boxed_remote_rm"
            assert await async_rm(args, sample) == 0.25
        bodies = [json.loads(body) for _, _, body in script.requests]
        assert bodies[0] == bodies[1] == {"prompt": "p", "response": r"r \boxed{b}", "label": "l"}
        assert bodies[2]["response"] == "b"

    async def test_a_server_that_answers_nonsense_is_named(self):
        async with serve(Script((200, "<html>"))) as url:
            with pytest.raises(RewardError, match="remote_rm returned '<html>' for sample 3"):
                await async_rm(make_args(rm_type="remote_rm", rm_url=url), Sample(index=3))

    async def test_needs_an_address(self):
        with pytest.raises(ValueError, match="set --rm-url"):
            await async_rm(make_args(rm_type="remote_rm"), Sample())


class TestCustom:
    async def test_it_is_called_with_sample_and_keywords(self, custom):
        seen = []

        async def reward(args, sample, **kwargs):
            seen.append((sample, kwargs))
            return 0.5

        args, sample = custom(reward, rm_type="unknown"), Sample()
        assert await async_rm(args, sample, extra=1) == 0.5
        assert seen == [(sample, {"extra": 1})]

    async def test_it_may_be_an_ordinary_function(self, custom):
        assert await async_rm(custom(lambda args, sample: 1), Sample()) == 1

    async def test_a_samples_own_function_wins(self):
        with function_registry.temporary("own", lambda args, sample: 7):
            sample = Sample(reward_spec=RewardSpec(custom_rm_path="own"))
            assert await async_rm(make_args(custom_rm_path="missing.module.f", rm_type="math"), sample) == 7

    async def test_its_exception_comes_through(self, custom):
        def fail(args, sample):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await async_rm(custom(fail), Sample())

    @pytest.mark.parametrize(
        ("value", "shown"),
        [(10**400, "1000"), (10**5000, "a int that is too long to be shown"), ("x" * 999, "'xxx")],
        ids=["400 digits", "5000 digits", "text"],
    )
    @pytest.mark.parametrize("key", [None, "r"])
    async def test_a_huge_value_is_an_error_with_function_and_sample(self, custom, value, shown, key):
        args = custom(lambda args, sample: {"r": value} if key else value, reward_key=key)
        with pytest.raises(RewardError, match=r"^custom returned .* for sample 17: .*a finite number") as caught:
            await async_rm(args, Sample(index=17))
        assert len(str(caught.value)) < 400
        assert key or shown in str(caught.value)

    @pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "0.5", [1.0], object, 1j])
    async def test_what_is_no_reward_is_an_error_with_function_sample_and_value(self, custom, value):
        args = custom(lambda args, sample: value)
        with pytest.raises(RewardError, match=r"^custom returned .* for sample 17: expected a finite number") as caught:
            await async_rm(args, Sample(index=17))
        assert repr(value) in str(caught.value)

    async def test_dictionaries_need_the_reward_key(self, custom):
        reward = {"score": 1.0, "eval": 2, "note": "x"}
        for keys in ({"reward_key": "score"}, {"reward_key": "absent", "eval_reward_key": "eval"}, {}):
            args = (
                custom(lambda args, sample: reward, **keys) if not keys else make_args(custom_rm_path="custom", **keys)
            )
            with function_registry.temporary("custom2", lambda args, sample: reward):
                args.custom_rm_path = "custom2"
                assert await async_rm(args, Sample()) is reward
                args.reward_key, args.eval_reward_key = "absent", None
                with pytest.raises(RewardError, match="for sample 2: no entry 'absent'"):
                    await async_rm(args, Sample(index=2))
                args.reward_key = "note"
                with pytest.raises(RewardError, match="entry 'note' is not a finite number"):
                    await async_rm(args, Sample(index=2))

    async def test_numbers_of_numpy_and_torch_are_numbers(self, custom):
        numpy = pytest.importorskip("numpy")
        values = [numpy.float32(0.5), numpy.int64(1), numpy.array(2.0), True]
        args = custom(lambda args, samples: values)
        assert await batched_async_rm(args, [Sample() for _ in values]) == [0.5, 1, 2.0, True]
        with function_registry.temporary("array", lambda args, samples: numpy.array([0.5, 1.0])):
            args.custom_rm_path = "array"
            assert await batched_async_rm(args, [Sample(), Sample()]) == [0.5, 1.0]


class TestMissing:
    @pytest.mark.parametrize("value", [None, float("nan")])
    async def test_the_error_says_what_could_be_done(self, custom, value):
        with pytest.raises(RewardError, match=r"for sample 3: .*--missing-reward remove"):
            await async_rm(custom(lambda args, sample: value), Sample(index=3))

    @pytest.mark.parametrize("value", [None, float("nan")])
    async def test_with_the_flag_the_sample_is_marked(self, custom, value):
        sample = Sample(metadata={"level": 1})
        assert await async_rm(custom(lambda args, sample: value, missing_reward="remove"), sample) == 0.0
        assert sample.remove_sample and sample.reward_is_placeholder
        assert sample.metadata == {"level": 1, "missing_reward": "custom"}

    @pytest.mark.parametrize("value", [float("inf"), "0.5", [1.0], object])
    async def test_what_is_wrong_stays_an_error(self, custom, value):
        with pytest.raises(RewardError, match="expected a finite number"):
            await async_rm(custom(lambda args, sample: value, missing_reward="remove"), Sample())

    @pytest.mark.parametrize(
        ("value", "reward"),
        [
            (None, {"score": 0.0, "eval": 0.0}),
            ({"score": None, "eval": 2, "note": None}, {"score": 0.0, "eval": 2, "note": None}),
        ],
    )
    async def test_the_entry_under_the_reward_key_counts(self, custom, value, reward):
        args = custom(lambda args, sample: value, missing_reward="remove", reward_key="score", eval_reward_key="eval")
        sample = Sample()
        assert await async_rm(args, sample) == reward
        assert sample.reward_is_placeholder

    async def test_a_reward_that_comes_with_the_next_answer_takes_the_mark_away(self, custom):
        rewards = [None, 1.0]
        args = custom(lambda args, sample: rewards.pop(0), missing_reward="remove")
        sample = Sample(status=Sample.Status.COMPLETED)
        await async_rm(args, sample)
        sample.reset_for_retry()
        assert await async_rm(args, sample) == 1.0
        assert not sample.remove_sample and not sample.reward_is_placeholder

    async def test_in_a_batch_only_those_without_one_are_marked(self, custom):
        samples = [Sample(index=0), Sample(index=1)]
        args = custom(lambda args, samples: [0.5, None], missing_reward="remove")
        assert await batched_async_rm(args, samples) == [0.5, 0.0]
        assert [sample.remove_sample for sample in samples] == [False, True]


class TestUserCode:
    async def test_an_exception_names_function_and_sample(self, custom):
        def fail(args, sample):
            raise KeyError("mine")

        args = custom(fail)
        with pytest.raises(KeyError) as raised:
            await async_rm(args, Sample(index=3, group_index=1))
        assert "fail, called for sample 3 of group 1, raised this" in raised.value.__notes__[0]
        with pytest.raises(KeyError) as raised:
            await batched_async_rm(args, [Sample(index=3), Sample(index=4)])
        assert "fail, called for samples [3, 4], raised this" in raised.value.__notes__[0]

    async def test_a_plain_function_runs_off_the_loop_and_an_async_one_on_it(self, custom):
        threads = []

        def plain(args, sample):
            threads.append(threading.current_thread().name)
            return 1.0

        await async_rm(custom(plain), Sample())
        assert threads == [THREAD_NAME]


class TestBatches:
    async def test_a_custom_function_is_called_once_with_the_list(self, custom):
        calls = []

        async def reward(args, samples, **kwargs):
            calls.append(samples)
            return [sample.index / 2 for sample in samples]

        samples = [Sample(index=i) for i in range(3)]
        assert await batched_async_rm(custom(reward), samples) == [0.0, 0.5, 1.0]
        assert calls == [samples]
        assert [sample.reward for sample in samples] == [None] * 3

    async def test_in_place_the_samples_keep_their_rewards(self):
        samples = [Sample(response="a b", label="a b"), Sample(response="c", label="a b")]
        await batched_async_rm(make_args(rm_type="f1"), samples, inplace_set_reward_field=True)
        assert [sample.reward for sample in samples] == [1.0, 0.0]
        with pytest.raises(ValueError, match="have a reward already"):
            await batched_async_rm(make_args(rm_type="f1"), samples, inplace_set_reward_field=True)

    async def test_samples_with_functions_of_their_own_are_rewarded_one_by_one(self, custom):
        async def common(args, sample):
            return 1.0

        args = custom(common)
        with function_registry.temporary("own", lambda args, sample: 2.0):
            samples = [Sample(), Sample(reward_spec=RewardSpec(custom_rm_path="own"))]
            assert await batched_async_rm(args, samples) == [1.0, 2.0]

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ([1.0], "custom returned 1 rewards for 2 samples"),
            (0.5, "custom returned 0.5 for 2 samples: expected a list"),
            (None, "custom returned None for 2 samples: expected a list"),
            ([1.0, None], "custom returned None for sample 1: expected a finite number"),
        ],
    )
    async def test_a_list_that_is_none_is_an_error(self, custom, value, message):
        with pytest.raises(RewardError, match=message):
            await batched_async_rm(custom(lambda args, samples: value), [Sample(index=0), Sample(index=1)])

    async def test_a_failing_reward_cancels_and_settles_the_others(self):
        ended, started = [], asyncio.Event()

        async def wait(args, sample):
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(sample.index)

        async def fail(args, sample):
            await started.wait()
            raise KeyError("mine")

        with function_registry.temporary("wait", wait), function_registry.temporary("fail", fail):
            samples = [
                Sample(index=i, reward_spec=RewardSpec(custom_rm_path=p)) for i, p in enumerate(["wait", "fail"])
            ]
            with pytest.raises(KeyError, match="mine"):
                await batched_async_rm(make_args(), samples)
        assert ended == [0]

    async def test_nothing_gives_nothing(self):
        assert await batched_async_rm(make_args(rm_type="math"), []) == []


def test_importing_it_is_light():
    code = "import sys, miles.rollout.rm_hub; print(*sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "ray", "transformers", "sympy", "math_verify", "numpy"} & set(modules)


async def test_a_whole_batch_of_hard_answers():
    try:
        samples = [Sample(response=rf"\boxed{{{i}.5}}", label=f"{2 * i + i % 2}/2") for i in range(20)]
        rewards = await batched_async_rm(make_args(rm_type="math"), samples)
        assert rewards == [i % 2 for i in range(20)]
    finally:
        close_grader()
