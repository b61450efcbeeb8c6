import threading
from argparse import Namespace

import pytest

from miles.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    acall_dynamic_filter,
    call_dynamic_filter,
)
from miles.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from miles.utils.types import Sample
from miles.utils.user_calls import THREAD_NAME, UserCalls, use_user_calls


def test_without_a_filter_every_group_is_kept():
    assert call_dynamic_filter(None, object(), []) == DynamicFilterOutput(keep=True, reason=None)


@pytest.mark.parametrize("verdict", [True, False])
def test_a_bare_bool_is_boxed(verdict):
    assert call_dynamic_filter(lambda args, group: verdict, None, []) == DynamicFilterOutput(keep=verdict)


def test_numpy_bool_is_a_bool():
    numpy = pytest.importorskip("numpy")
    assert call_dynamic_filter(lambda: numpy.float64(1) > 2) == DynamicFilterOutput(keep=False)


def test_arguments_and_output_pass_through():
    output = DynamicFilterOutput(keep=False, reason="short")
    seen = []

    def keep_nothing(*args, **kwargs):
        seen.append((args, kwargs))
        return output

    assert call_dynamic_filter(keep_nothing, "args", ["group"], key=1) is output
    assert seen == [(("args", ["group"]), {"key": 1})]


@pytest.mark.parametrize("verdict", [None, "yes", 1])
def test_no_verdict_is_an_error_that_names_the_filter(verdict):
    def forgetful(args, group):
        return verdict

    with pytest.raises(TypeError, match=r"forgetful returned .*DynamicFilterOutput"):
        call_dynamic_filter(forgetful, None, [])


def test_drops_are_counted_by_reason_and_only_with_one():
    gatherer = MetricGatherer()
    assert gatherer.collect() == {}
    for reason in ("zero_std_0.0", "zero_std_1.0", "zero_std_0.0", None, ""):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {
        "rollout/dynamic_filter/drop_zero_std_0.0": 2,
        "rollout/dynamic_filter/drop_zero_std_1.0": 1,
    }


async def test_from_a_loop_a_plain_filter_runs_on_the_thread_for_user_functions_and_an_async_one_on_the_loop():
    threads = []

    def plain(args, group):
        threads.append(threading.current_thread().name)
        return False

    async def on_loop(args, group):
        threads.append(threading.current_thread().name)
        return DynamicFilterOutput(keep=False, reason="short")

    assert await acall_dynamic_filter(None, None, []) == DynamicFilterOutput(keep=True)
    assert await acall_dynamic_filter(plain, None, []) == DynamicFilterOutput(keep=False)
    assert await acall_dynamic_filter(on_loop, None, []) == DynamicFilterOutput(keep=False, reason="short")
    assert threads == [THREAD_NAME, threading.current_thread().name]


async def test_the_ready_made_filters_run_on_the_loop():
    with use_user_calls(UserCalls()) as calls:
        group = [Sample(reward=0.0), Sample(reward=1.0)]
        assert (await acall_dynamic_filter(check_reward_nonzero_std, Namespace(), group)).keep
        assert calls._thread is None


async def test_an_error_keeps_its_identity_and_names_filter_and_group():
    error = LookupError("mine")

    def broken(args, group):
        raise error

    with pytest.raises(LookupError) as raised:
        await acall_dynamic_filter(broken, None, [[Sample(group_index=4)], Sample(group_index=4)])
    assert raised.value is error
    assert "dynamic filter" in error.__notes__[0] and "broken, called for group 4, raised this" in error.__notes__[0]


async def test_no_verdict_is_an_error_that_names_filter_group_and_value():
    with pytest.raises(TypeError, match=r"<lambda> returned 'yes' for group 4: expected a DynamicFilterOutput"):
        await acall_dynamic_filter(lambda args, group: "yes", None, [Sample(group_index=4)])
