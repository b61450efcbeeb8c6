"""What the fully-async rollout does with finished groups, and how the worker feeds it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import miles.rollout.fully_async_rollout as module
from miles.rollout.base_types import (
    GenerateFnInput,
    GenerateFnOutput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
)
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.fakes import (
    FakeDataSource,
    FakeWeightVersion,
    GatedGeneration,
    answer,
    finished,
    group_indexes,
    prompt_group,
    rollout_args,
)
from tests.fast.rollout.fully_async_setup import build, fed_by_hand, running, train
from tests.fast.virtual_time import settle, virtual

ABORTED, COMPLETED = Sample.Status.ABORTED, Sample.Status.COMPLETED
PREFIX = "rollout/fully_async/"


def nested(group_index: int, **how: Any) -> tuple[list[Sample], list[Any]]:
    """A group whose two trajectories became two and one training sequences, apart from the prompt's own samples."""
    flat = prompt_group(group_index)
    parts = answer(prompt_group(group_index, 3), **how)
    for part, sample in zip(parts, [flat[0], flat[0], flat[1]], strict=True):
        part.index = sample.index
    return flat, [parts[:2], parts[2]]


# ---- the batch


@virtual
async def test_drain_collects_batch_sorted_with_metrics(monkeypatch):
    async with fed_by_hand(monkeypatch, finished(2), finished(0), finished(1), finished(3), rollout_batch_size=3) as fn:
        output = await fn(train())

    assert group_indexes(output.samples) == [0, 1, 2]
    expected = {
        PREFIX + "queue_size": 1,
        PREFIX + "aborted_groups_recycled": 0,
        PREFIX + "stale_groups_recycled": 0,
    }
    assert expected.items() <= output.metrics.items()


@virtual
async def test_worker_collects_batches_from_the_data_source(monkeypatch):
    async with running(monkeypatch, rollout_batch_size=3) as fn:
        first = await fn(train(0))
        second = await fn(train(1))
    assert group_indexes(first.samples) == [0, 1, 2]
    assert group_indexes(second.samples) == [3, 4, 5]
    assert all(sample.response == "yes" for group in first.samples for sample in group)


@virtual
async def test_drain_sorts_nested_groups_by_their_first_sample(monkeypatch):
    async with fed_by_hand(monkeypatch, nested(5), finished(7), nested(1), rollout_batch_size=3) as fn:
        output = await fn(train())
    assert group_indexes(output.samples) == [1, 5, 7]
    assert [len(group) for group in output.samples] == [2, 2, 2]


@virtual
async def test_groups_without_an_index_come_last_in_their_order(monkeypatch):
    unnumbered = [finished(0), finished(1)]
    for prompts, _ in unnumbered:
        for sample in prompts:
            sample.index = None
    async with fed_by_hand(monkeypatch, *unnumbered, finished(9), rollout_batch_size=3) as fn:
        output = await fn(train())
    assert group_indexes(output.samples) == [9, 0, 1]


@virtual
async def test_generation_is_called_with_the_instance_state_and_the_promised_keywords(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate, rollout_batch_size=1) as fn:
        generate.finish(0)
        await fn(train())
        state = fn.state
    assert generate.calls[0] == {"state": state, "sampling_params": state.sampling_params, "evaluation": False}


@virtual
async def test_group_of_the_wrong_size_is_an_error_naming_it(monkeypatch):
    prompts, group = finished(4)
    async with fed_by_hand(monkeypatch, (prompts, group[:1]), rollout_batch_size=1) as fn:
        with pytest.raises(ValueError, match=r"group 4 \(samples 8..9\) has 1 members, --n-samples-per-prompt is 2"):
            await fn(train())
        with pytest.raises(ValueError, match="group 4"):
            await fn(train(1))


@virtual
async def test_generation_that_returns_no_list_is_an_error_naming_the_group(monkeypatch):
    async def forget_to_return(state: Any, group: list[Sample], **keywords: Any) -> None: ...

    async with running(monkeypatch, forget_to_return) as fn:
        with pytest.raises(TypeError, match=r"generating group 0 \(samples 0..1\) returned None"):
            await fn(train())


# ---- eval and user mistakes


@virtual
async def test_eval_raises(monkeypatch):
    fn = build(monkeypatch)
    with pytest.raises(ValueError, match="--eval-function-path"):
        await fn(RolloutFnEvalInput(rollout_id=0))
    assert fn._worker is None
    assert fn._output is None
    assert fn.data_source.pulled == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rollout_global_dataset": False}, "--disable-rollout-global-dataset"),
        ({"rollout_batch_size": 0}, "--rollout-batch-size must be at least 1, got 0"),
        ({"n_samples_per_prompt": 0}, "--n-samples-per-prompt must be at least 1, got 0"),
        ({"max_weight_staleness": -1}, "--max-weight-staleness must be at least 0, got -1"),
        ({"async_max_concurrent_samples": 0}, "--async-max-concurrent-samples must be at least 1, got 0"),
        ({"async_data_buffer_capacity_factor": 0.0}, "--async-data-buffer-capacity-factor must be above 0, got 0.0"),
    ],
)
def test_bad_flags_are_value_errors_that_name_the_flag(monkeypatch, flags, message):
    with pytest.raises(ValueError, match=message):
        build(monkeypatch, **flags)


def test_filters_are_loaded_from_their_flags(monkeypatch):
    def keep_all(args: Any, group: Any, **kwargs: Any) -> bool:
        return True

    def mark(args: Any, data: Any) -> None: ...

    with function_registry.temporary("dynamic", keep_all), function_registry.temporary("sample", mark):
        fn = build(monkeypatch, dynamic_sampling_filter_path="dynamic", rollout_sample_filter_path="sample")
    assert fn._dynamic_filter is keep_all
    assert fn._sample_filter is mark


def test_instances_share_no_state(monkeypatch):
    monkeypatch.setattr(module, "GenerateState", lambda args: object())
    source = FakeDataSource()
    one, two = (module.FullyAsyncRolloutFn(RolloutFnConstructorInput(rollout_args(), source)) for _ in range(2))
    assert one.state is not two.state
    assert one._weight_version is not two._weight_version


# ---- recycling


@virtual
async def test_aborted_group_recycled(monkeypatch):
    source = FakeDataSource()
    prompts, group = finished(0)
    group[1].status = ABORTED
    async with fed_by_hand(monkeypatch, (prompts, group), finished(1), data_source=source, rollout_batch_size=1) as fn:
        output = await fn(train())

    assert group_indexes(output.samples) == [1]
    assert output.metrics[PREFIX + "aborted_groups_recycled"] == 1
    assert output.metrics[PREFIX + "stale_groups_recycled"] == 0
    assert len(source.added) == 1
    assert source.added[0] is prompts
    assert all(sample.response == "" and sample.tokens == [] and sample.reward is None for sample in prompts)


@virtual
async def test_stale_group_recycled(monkeypatch):
    source = FakeDataSource()
    groups = [finished(0, versions=("4", "7")), finished(1, versions=("5", "7")), finished(2, versions=("7",))]
    async with fed_by_hand(monkeypatch, *groups, data_source=source, max_weight_staleness=2) as fn:
        fn._weight_version = FakeWeightVersion(7)
        output = await fn(train())

    assert group_indexes(output.samples) == [1, 2]
    assert source.added == [groups[0][0]]
    assert groups[0][0][0].weight_versions == []
    expected = {
        PREFIX + "queue_size": 0,
        PREFIX + "aborted_groups_recycled": 0,
        PREFIX + "stale_groups_recycled": 1,
        PREFIX + "unknown_version_groups": 0,
        PREFIX + "avg_staleness": pytest.approx((3 + 2 + 0) / 3),
        PREFIX + "max_staleness": 3,
        PREFIX + "trained_avg_staleness": 1.0,
        PREFIX + "trained_max_staleness": 2,
    }
    assert expected.items() <= output.metrics.items()


@virtual
async def test_nested_group_recycles_the_flat_prompt_group(monkeypatch):
    source = FakeDataSource()
    aborted = nested(0)
    aborted[1][0][1].status = ABORTED
    stale = nested(1, versions=("9",))
    stale[1][0][1].weight_versions = ["1"]
    fresh = nested(2, versions=("9",))
    async with fed_by_hand(
        monkeypatch, aborted, stale, fresh, data_source=source, max_weight_staleness=1, rollout_batch_size=1
    ) as fn:
        output = await fn(train(weight_version=9))

    assert group_indexes(output.samples) == [2]
    assert [group is flat for group, flat in zip(source.added, [aborted[0], stale[0]], strict=True)] == [True, True]
    assert output.metrics[PREFIX + "aborted_groups_recycled"] == 1
    assert output.metrics[PREFIX + "stale_groups_recycled"] == 1


@virtual
async def test_prompt_group_stays_flat_when_generation_changes_its_list_in_place(monkeypatch):
    source = FakeDataSource()
    generate = GatedGeneration()

    def nest_and_abort(group: list[Any]) -> list[Any]:
        group[0] = answer([group[0], Sample(index=0)], status=ABORTED)
        return group

    async with running(monkeypatch, generate, source, rollout_batch_size=1) as fn:
        drain = asyncio.create_task(fn(train()))
        generate.finish(0, make=nest_and_abort)
        await settle()
        assert source.added == [source.pulled[0]]
        assert all(isinstance(sample, Sample) and sample.response == "" for sample in source.added[0])
        generate.finish(1)
        assert group_indexes((await drain).samples) == [1]


@virtual
async def test_recycled_group_is_generated_again_from_its_start(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate, rollout_batch_size=1) as fn:
        drain = asyncio.create_task(fn(train()))
        generate.finish(0, make=lambda group: answer(group, status=ABORTED))
        await settle()
        generate.finish(1)
        assert group_indexes((await drain).samples) == [1]
        drain = asyncio.create_task(fn(train(1)))
        await settle()
        generate.finish(0)
        assert group_indexes((await drain).samples) == [0]
    assert generate.started[:3] == [0, 1, 0]


# ---- filters


@virtual
async def test_dynamic_filter_drops_group_without_recycling(monkeypatch):
    source = FakeDataSource()

    def no_zero_reward(args: Any, group: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
        return DynamicFilterOutput(keep=group[0].reward != 0.0, reason="zero_reward")

    async with fed_by_hand(
        monkeypatch, finished(0, reward=0.0), finished(1), finished(2, reward=0.0), finished(3), data_source=source
    ) as fn:
        fn._dynamic_filter = no_zero_reward
        output = await fn(train())

    assert group_indexes(output.samples) == [1, 3]
    assert output.metrics["rollout/dynamic_filter/drop_zero_reward"] == 2
    assert source.added == []


@virtual
async def test_groups_that_a_filter_drops_without_a_reason_are_counted(monkeypatch):
    async with fed_by_hand(monkeypatch, finished(0, reward=0.0), finished(1), finished(2)) as fn:
        fn._dynamic_filter = lambda args, group: group[0].reward != 0.0
        output = await fn(train())
    assert output.metrics["rollout/dynamic_filter/drop_unspecified"] == 1


@virtual
async def test_sample_filter_marks_samples_without_shrinking_the_batch(monkeypatch):
    seen = []

    def mark_first(args: Any, data: list[list[Sample]]) -> None:
        seen.append((args, group_indexes(data)))
        data[0][0].remove_sample = True

    async with fed_by_hand(monkeypatch, finished(1), finished(0)) as fn:
        fn._sample_filter = mark_first
        output = await fn(train())

    assert seen == [(fn.args, [0, 1])]
    assert [[sample.remove_sample for sample in group] for group in output.samples] == [[True, False], [False, False]]


@pytest.mark.parametrize("shrink", [lambda data: data.pop(), lambda data: data[0].pop()], ids=["group", "sample"])
@virtual
async def test_sample_filter_that_changes_the_shape_is_an_error(monkeypatch, shrink):
    async with fed_by_hand(monkeypatch, finished(0), finished(1)) as fn:
        fn._sample_filter = lambda args, data: shrink(data)
        with pytest.raises(ValueError, match="--rollout-sample-filter-path"):
            await fn(train())


# ---- staleness


@virtual
async def test_without_a_limit_nothing_is_queried_and_nothing_measured(monkeypatch):
    async with fed_by_hand(monkeypatch, finished(0, versions=("1",)), finished(1, versions=("1",))) as fn:
        fn._weight_version = FakeWeightVersion(99)
        output = await fn(train())
        assert fn._weight_version.queries == 0
    assert not [key for key in output.metrics if key.endswith(("avg_staleness", "max_staleness"))]
    assert output.metrics[PREFIX + "trained_staleness_in_flight_mean"] == 0


@virtual
async def test_without_a_limit_staleness_is_reported_where_the_trainer_gives_its_number(monkeypatch):
    async with fed_by_hand(monkeypatch, finished(0, versions=("1",)), finished(1, versions=("4",))) as fn:
        fn._weight_version = FakeWeightVersion(99)
        output = await fn(train(weight_version=5))
        assert fn._weight_version.queries == 0
    assert output.metrics[PREFIX + "avg_staleness"] == 2.5
    assert output.metrics[PREFIX + "trained_max_staleness"] == 4
    assert output.metrics[PREFIX + "stale_groups_recycled"] == 0


@virtual
async def test_the_trainers_number_wins_over_a_query(monkeypatch):
    async with fed_by_hand(
        monkeypatch, finished(0, versions=("4",)), rollout_batch_size=1, max_weight_staleness=1
    ) as fn:
        fn._weight_version = FakeWeightVersion(99)
        output = await fn(train(weight_version=5))
        assert fn._weight_version.queries == 0
    assert output.metrics[PREFIX + "avg_staleness"] == 1


@virtual
async def test_trainers_number_zero_is_a_number(monkeypatch):
    async with fed_by_hand(
        monkeypatch, finished(0, versions=("0",)), rollout_batch_size=1, max_weight_staleness=0
    ) as fn:
        fn._weight_version = FakeWeightVersion(99)
        output = await fn(train(weight_version=0))
    assert output.metrics[PREFIX + "max_staleness"] == 0


@virtual
async def test_group_newer_than_the_trainers_number_counts_as_fresh(monkeypatch):
    async with fed_by_hand(monkeypatch, finished(0, versions=("6",)), rollout_batch_size=1) as fn:
        output = await fn(train(weight_version=5))
    assert output.metrics[PREFIX + "avg_staleness"] == 0


@virtual
async def test_group_of_unknown_version_is_kept_counted_and_left_out_of_the_averages(monkeypatch, caplog):
    unknown = [finished(0, versions=("default",)), finished(1)]
    async with fed_by_hand(
        monkeypatch, *unknown, finished(2, versions=("3",)), rollout_batch_size=3, max_weight_staleness=1
    ) as fn:
        output = await fn(train(weight_version=4))
    assert group_indexes(output.samples) == [0, 1, 2]
    assert output.metrics[PREFIX + "unknown_version_groups"] == 2
    assert output.metrics[PREFIX + "avg_staleness"] == 1.0
    assert "--max-weight-staleness 1 could not be applied to 2 groups" in caplog.text


@virtual
async def test_staleness_keys_are_absent_where_nothing_could_be_measured(monkeypatch):
    async with fed_by_hand(
        monkeypatch, finished(0, versions=("3",)), rollout_batch_size=1, max_weight_staleness=1
    ) as fn:
        fn._weight_version = FakeWeightVersion(None)
        output = await fn(train())
    assert output.metrics[PREFIX + "unknown_version_groups"] == 1
    assert PREFIX + "avg_staleness" not in output.metrics
    assert PREFIX + "trained_avg_staleness" not in output.metrics


@virtual
async def test_dropped_groups_are_measured_but_not_trained(monkeypatch):
    async with fed_by_hand(
        monkeypatch, finished(0, versions=("1",)), finished(1, versions=("5",)), rollout_batch_size=1
    ) as fn:
        fn._dynamic_filter = lambda args, group: group[0].group_index != 0
        output = await fn(train(weight_version=5))
    assert output.metrics[PREFIX + "max_staleness"] == 4
    assert output.metrics[PREFIX + "trained_max_staleness"] == 0


@pytest.mark.parametrize(
    ("versions", "oldest"), [([["3"], ["12"]], 3), ([["9", "10"], ["default"]], 9), ([["default"], []], None)]
)
def test_oldest_weight_version_of_a_group_compares_numbers(versions, oldest):
    group: list[Any] = prompt_group(0)
    for sample, labels in zip(group, versions, strict=True):
        sample.weight_versions = labels
    assert module.group_oldest_weight_version(group) == oldest
    assert module.group_oldest_weight_version([group[:1], [[group[1]]]]) == oldest


def test_samples_are_found_at_any_nesting():
    a, b, c = (Sample(index=i) for i in range(3))
    assert list(module._iter_samples([[a, [b]], c])) == [a, b, c]
    assert module._first_sample([[], [[a]], c]) is a
    with pytest.raises(ValueError, match="without any sample"):
        module._first_sample([[], []])


# ---- the worker


@virtual
async def test_worker_error_propagates(monkeypatch):
    generate = GatedGeneration()
    error = ZeroDivisionError("in a reward function")
    async with running(monkeypatch, generate) as fn:
        drain = asyncio.create_task(fn(train()))
        await settle()
        generate.fail(1, error)
        with pytest.raises(ZeroDivisionError) as raised:
            await drain
        assert raised.value is error
        assert any(entry.name == "__call__" and "fakes" in str(entry.path) for entry in raised.traceback)
        for rollout_id in (1, 2):  # it neither hangs nor starts again
            with pytest.raises(ZeroDivisionError):
                await fn(train(rollout_id))
        assert generate.started == [0, 1]
        assert generate.running == []


@virtual
async def test_worker_failure_beats_queued_groups(monkeypatch):
    generate = GatedGeneration()
    error = RuntimeError("boom")
    async with running(monkeypatch, generate, rollout_batch_size=2, async_max_concurrent_samples=8) as fn:
        drain = asyncio.create_task(fn(train()))
        await settle()
        generate.finish(0, 1, 2)
        generate.fail(3, error)
        with pytest.raises(RuntimeError) as raised:
            await drain
        assert raised.value is error
        assert fn.queue_size == 3


@virtual
async def test_failure_of_a_replaced_worker_beats_queued_groups(monkeypatch):
    error = KeyError("lost")

    async def fail() -> None:
        raise error

    async with fed_by_hand(monkeypatch, finished(0), finished(1), rollout_batch_size=1) as fn:
        fn._worker.cancel()
        fn._worker = asyncio.create_task(fail())
        with pytest.raises(KeyError) as raised:
            await fn(train())
        assert raised.value is error
        assert fn.queue_size == 2


@virtual
async def test_worker_bounds_in_flight_groups(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate, rollout_batch_size=3) as fn:
        drain = asyncio.create_task(fn(train()))
        await settle()
        assert generate.running == [0, 1, 2]
        for group_index in range(6):
            generate.finish(group_index)
            await settle()
            assert len(generate.running) == 3
        await drain
        assert fn.max_in_flight_groups == 3
    assert generate.peak == 3


@pytest.mark.parametrize(("samples", "groups"), [(8, 2), (11, 2), (4, 1), (3, 1), (64, 16)])
@virtual
async def test_async_max_concurrent_samples_caps_in_flight_groups(monkeypatch, samples, groups):
    generate = GatedGeneration()
    async with running(
        monkeypatch, generate, rollout_batch_size=5, n_samples_per_prompt=4, async_max_concurrent_samples=samples
    ) as fn:
        drain = asyncio.create_task(fn(train()))
        await settle(40)
        assert len(generate.running) == groups
        assert fn.max_in_flight_groups == groups
        for group_index in range(5):
            generate.finish(group_index)
            await settle(40)
        await drain
    assert generate.peak == groups


@virtual
async def test_worker_lives_across_calls_and_generates_between_them(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate, rollout_batch_size=1, async_max_concurrent_samples=4) as fn:
        generate.finish(0)
        await fn(train(0))
        worker, output = fn._worker, fn._output
        generate.finish(1, 2)
        await settle()  # nobody calls; the worker goes on
        assert generate.started == [0, 1, 2, 3, 4]
        second = await fn(train(1))
        assert group_indexes(second.samples) == [1]
        assert second.metrics[PREFIX + "queue_size"] == 1
        assert fn._worker is worker
        assert fn._output is output
        assert not worker.done()


@virtual
async def test_a_full_queue_pauses_submission(monkeypatch):
    monkeypatch.setattr(module, "OUTPUT_QUEUE_MAX_GROUPS", 5)
    source = FakeDataSource()
    async with running(monkeypatch, data_source=source, rollout_batch_size=2) as fn:
        await fn(train(0))
        await settle(200)
        assert fn.queue_size == fn.queue_capacity == 5
        taken, in_flight = 2, 2
        assert len(source.pulled) == taken + 5 + in_flight
        await fn(train(1))
        await settle(200)
        assert len(source.pulled) == taken + 2 + 5 + in_flight
        assert fn.queue_size == 5


@pytest.mark.parametrize(("factor", "capacity"), [(None, 1000), (1.5, 6), (0.1, 1), (2.0, 8)])
@virtual
async def test_queue_capacity_is_1000_groups_or_the_factor_times_the_batch(monkeypatch, factor, capacity):
    flags = {} if factor is None else {"async_data_buffer_capacity_factor": factor}
    async with running(monkeypatch, rollout_batch_size=4, **flags) as fn:
        await fn(train())
        assert fn.queue_capacity == fn._output.maxsize == capacity


# ---- no progress


@virtual
async def test_warns_with_numbers_every_30_seconds_without_progress(monkeypatch, caplog):
    generate = GatedGeneration()
    async with running(monkeypatch, generate, rollout_batch_size=2) as fn:
        drain = asyncio.create_task(fn(train()))
        await asyncio.sleep(10)
        generate.finish(0)
        await asyncio.sleep(65)
        drain.cancel()
        await asyncio.wait({drain})
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "no finished group for 30 s: 1 of 2 groups kept, 0 queued, 2 of 2 in flight, "
        "the oldest for 40 s: group 1 (samples 2..3)",
        "no finished group for 60 s: 1 of 2 groups kept, 0 queued, 2 of 2 in flight, "
        "the oldest for 70 s: group 1 (samples 2..3)",
    ]


@virtual
async def test_does_not_warn_while_groups_come_in(monkeypatch, caplog):
    async def slow(state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        await asyncio.sleep(29)
        return answer(group)

    async with running(monkeypatch, slow, rollout_batch_size=4, async_max_concurrent_samples=2) as fn:
        await fn(train())
    assert caplog.records == []


# ---- together with the real generation path


@virtual
async def test_custom_generate_function_gets_the_instances_generate_state_and_retries_recycled_groups():
    inputs = []

    async def custom_generate(input: GenerateFnInput) -> GenerateFnOutput:
        inputs.append(input)
        await asyncio.sleep(input.sample.index or 0)
        first_try = input.sample.status == Sample.Status.PENDING
        answer([input.sample], status=ABORTED if first_try and input.sample.group_index == 0 else COMPLETED)
        return GenerateFnOutput(input.sample)

    with function_registry.temporary("custom_generate", custom_generate):
        args = rollout_args(custom_generate_function_path="custom_generate")
        fn = module.FullyAsyncRolloutFn(RolloutFnConstructorInput(args, FakeDataSource()))
        output = await fn(train())
    try:
        assert group_indexes(output.samples) == [0, 1]
        assert output.metrics[PREFIX + "aborted_groups_recycled"] == 1
        assert isinstance(fn.state, GenerateState)
        assert all(input.state is fn.state and not input.evaluation for input in inputs)
        assert inputs[0].sampling_params == fn.state.sampling_params
        assert inputs[0].sampling_params is not fn.state.sampling_params
    finally:
        await fn.close()


@virtual
async def test_weight_version_throttles_failed_queries(monkeypatch):
    urls: list[str] = []

    async def refuse(url: str) -> Any:
        urls.append(url)
        raise ConnectionRefusedError

    monkeypatch.setattr(module, "get", refuse)
    cached = module._CachedWeightVersion(1.0)
    for second in range(1, 4):
        for _ in range(5):
            assert await cached.get(rollout_args()) is None
        assert len(urls) == second
        await asyncio.sleep(1.0)
