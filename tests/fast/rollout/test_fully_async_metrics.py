"""Each metric of the fixed set against a schedule whose true values are worked out by hand, in the comments.

Time is virtual: generation takes exactly as long as the schedule says.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from miles.ray.step_metrics import fully_async_driver_metrics
from miles.utils.loop_lag import LoopLagWatch
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.fakes import FakeDataSource, FakeWeightVersion, GatedGeneration, answer, finished, group_indexes
from tests.fast.rollout.fully_async_setup import build, fed_by_hand, running, train
from tests.fast.virtual_time import settle, virtual

if TYPE_CHECKING:
    from miles.rollout._fully_async_buffer import DataBufferConstructorInput, DataBufferInput

PREFIX = "rollout/fully_async/"
BY_DRIVER = {"train_idle_fraction", "weight_update_pause_seconds"}
RECYCLE_REASONS = ("aborted", "stale", "unused", "restored")
DROP_REASONS = ("filtered", "max_retries", "aborted", "stale", "unused")
FIXED = {
    *("generation_idle_fraction", "producer_blocked_seconds", "consumer_wait_seconds"),
    *("queue_size", "queue_peak", "queue_bytes", "in_flight_samples", "in_flight_bound"),
    *("completion_to_train_seconds_mean", "completion_to_train_seconds_max"),
    *("trained_staleness_in_flight_mean", "trained_staleness_in_queue_mean"),
    *("tokens_generated", "tokens_trained", "response_len_generated_mean", "response_len_trained_mean"),
    *("groups_pulled", "groups_trained", "sample_retries", "unknown_version_samples"),
    *("event_loop_lag_p99_seconds", "event_loop_lag_max_seconds"),
    *(f"groups_recycled_{reason}" for reason in RECYCLE_REASONS),
    *(f"groups_dropped_{reason}" for reason in DROP_REASONS),
    *(f"tokens_wasted_{reason}" for reason in (*RECYCLE_REASONS, *DROP_REASONS)),
    *("aborted_groups_recycled", "stale_groups_recycled", "data_ended"),
}


def fully_async(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(PREFIX): value for key, value in metrics.items() if key.startswith(PREFIX)}


def test_every_key_of_the_fixed_set_is_documented():
    """In the first column of the user guide's tables, where `_{a,b}` stands for two keys and `<reason>` for several."""
    page = (Path(__file__).parents[3] / "docs" / "user-guide" / "fully-async.md").read_text()
    section = page.split("### `rollout/fully_async/`")[1].split("\n### ")[0]
    documented = set()
    for row in re.findall(r"^\| (`.*?) \| .{10}", section, re.MULTILINE):
        for name in re.findall(r"`(.*?)`", row):
            prefix, _, rest = name.partition("{")
            choices, _, suffix = rest.partition("}")
            documented |= {prefix + choice + suffix for choice in choices.split(",")}
    reasons = "|".join({*RECYCLE_REASONS, *DROP_REASONS})
    keys = {re.sub(rf"^((groups_(recycled|dropped)|tokens_wasted)_)({reasons})$", r"\1<reason>", key) for key in FIXED}
    assert keys | BY_DRIVER <= documented


def wasted(metrics: dict[str, Any]) -> dict[str, int]:
    """What was recycled, dropped and wasted, without the zeros."""
    kinds = ("groups_recycled_", "groups_dropped_", "tokens_wasted_")
    return {key: value for key, value in fully_async(metrics).items() if key.startswith(kinds) and value}


class TimedGeneration:
    """Group i takes `seconds[i]` (60 where that says nothing) and answers each sample with 10 * i tokens.

    `version` is what the engines serve; a group carries the versions of its start and its end.
    """

    def __init__(self, **seconds: float) -> None:
        self._seconds = {int(name.removeprefix("g")): value for name, value in seconds.items()}
        self.version = 1

    async def __call__(self, state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        index = group[0].group_index
        born = self.version
        await asyncio.sleep(self._seconds.get(index, 60.0))
        answer(group, versions=(str(born), str(self.version)))
        for sample in group:
            sample.response_length = 10 * index
        return group


async def until(seconds: float) -> None:
    await asyncio.sleep(seconds - asyncio.get_running_loop().time())


@virtual
async def test_two_steps_by_hand(monkeypatch):
    """Batches of 2 groups, 2 samples each; 2 groups in flight; room for 1 finished group (0.5 batches).

    second     0    1    2    3    4    5    6    7    8    9   10
    in flight  g0===|         |
               g1=============|
                    g2==================|blocked.................|
                              g3===|g4========|blocked...........|
    queue                          |g3..........................|
    versions   1                      2               3
    calls      0..............|                                 1|
    trainer                   |trains on batch 0          ack|
    """
    generate = TimedGeneration(g0=1, g1=3, g2=4, g3=1, g4=2)
    source = FakeDataSource()
    async with running(monkeypatch, generate, source, async_data_buffer_capacity_factor=0.5) as fn:
        fn.on_weight_version(1)
        output = await fn(train(0))
        assert asyncio.get_running_loop().time() == 3
        assert group_indexes(output.samples) == [0, 1]
        first = fully_async(output.metrics)
        pulled = [len(source.pulled)]

        await until(4.5)
        generate.version = 2
        fn.on_weight_version(2)
        await until(8)
        generate.version = 3
        fn.on_weight_version(3)
        fn.acknowledge(0)
        await until(10)
        output = await fn(train(1))
        assert asyncio.get_running_loop().time() == 10
        assert group_indexes(output.samples) == [2, 3]
        second = fully_async(output.metrics)
        pulled.append(len(source.pulled))

    # window 0..3: something is generated all the time; the call waits 1 s for g0 and 2 s for g1
    assert first["generation_idle_fraction"] == 0
    assert first["producer_blocked_seconds"] == 0
    assert first["consumer_wait_seconds"] == pytest.approx(3)
    assert first["queue_peak"] == 1  # each finished group for an instant
    assert first["queue_size"] == first["queue_bytes"] == 0
    assert first["completion_to_train_seconds_mean"] == pytest.approx((2 + 0) / 2)
    assert first["completion_to_train_seconds_max"] == pytest.approx(2)
    assert first["trained_staleness_in_flight_mean"] == first["trained_staleness_in_queue_mean"] == 0
    assert first["tokens_generated"] == 2 * (0 + 10)
    assert first["tokens_trained"] == first["groups_trained"] == 0  # not acknowledged yet

    # window 3..10: g2 is generated until 5, g4 until 6, then both wait for room: nothing is generated from 6 to 10
    assert second["generation_idle_fraction"] == pytest.approx(4 / 7)
    assert second["producer_blocked_seconds"] == pytest.approx(10 - 5)  # g2 from 5 on, g4 with it from 6 on
    assert second["consumer_wait_seconds"] == 0
    assert second["completion_to_train_seconds_mean"] == pytest.approx(((10 - 5) + (10 - 4)) / 2)
    assert second["completion_to_train_seconds_max"] == pytest.approx(6)
    # g2, versions 1 and 2 at version 3: one passed in flight, one while it waited; g3, version 1: two while it waited
    assert second["trained_avg_staleness"] == 2
    assert second["trained_staleness_in_flight_mean"] == (1 + 0) / 2
    assert second["trained_staleness_in_queue_mean"] == (1 + 2) / 2
    assert second["tokens_generated"] == 2 * (20 + 30 + 40)
    assert (second["groups_trained"], second["tokens_trained"]) == (2, 2 * (0 + 10))
    assert second["response_len_generated_mean"] == (20 + 30 + 40) / 3
    assert second["response_len_trained_mean"] == (0 + 10) / 2
    assert first["groups_pulled"] == pulled[0]
    assert second["groups_pulled"] == pulled[1] - pulled[0]


@virtual
async def test_every_key_is_there_in_every_step(monkeypatch):
    generation = GatedGeneration()
    async with running(monkeypatch, generation) as fn:
        fn.on_weight_version(1)
        keys = []
        for step in range(3):
            call = asyncio.create_task(fn(train(step)))
            await settle()
            generation.finish(*generation.running[:2])
            keys.append(set(fully_async((await call).metrics)))
    measured = {"avg_staleness", "max_staleness", "trained_avg_staleness", "trained_max_staleness"}
    assert keys[0] - measured - {"unknown_version_groups"} == FIXED
    assert keys[0] == keys[1] == keys[2]


@virtual
async def test_gauges_of_queue_and_flight(monkeypatch):
    generation = GatedGeneration()
    async with running(monkeypatch, generation, rollout_batch_size=1, async_max_concurrent_samples=6) as fn:
        call = asyncio.create_task(fn(train(0)))
        await settle()
        generation.finish(0)
        await call
        await settle()
        generation.finish(1, 2, 3)  # three wait at once
        await settle()
        metrics = fully_async((await fn(train(1))).metrics)
        assert metrics["queue_peak"] == 3
        assert metrics["queue_size"] == 2
        # a sample: itself, 2 prompt tokens and 1 response token; 2 samples a group, 2 groups
        assert metrics["queue_bytes"] == 2 * 2 * (2048 + 2 * 48 + 80)
        assert (metrics["in_flight_samples"], metrics["in_flight_bound"]) == (6, 6)
        metrics = fully_async((await fn(train(2))).metrics)
        assert (metrics["queue_peak"], metrics["queue_size"]) == (2, 1)  # the peak starts again at what was there


@virtual
async def test_by_sample_generation_is_idle_while_only_rewards_are_computed(monkeypatch):
    """Groups 0 and 1 free their places at 1 s and 2 s, and at 3 s and 4 s; the limit lets no third one start. The
    reward of group 0 takes until 8 s."""

    async def generate(state: Any, group: list[Sample], *, sample_done_callback: Any, **keywords: Any) -> list[Sample]:
        for _ in group:
            await asyncio.sleep(1)
            sample_done_callback()
        await asyncio.sleep(6)
        return answer(group, versions=("1",))

    async with running(
        monkeypatch,
        generate,
        rollout_batch_size=1,
        async_max_concurrent_samples=2,
        rollout_submission_granularity="sample",
        max_weight_staleness=1,
    ) as fn:
        fn.on_weight_version(1)
        metrics = fully_async((await fn(train(0))).metrics)
    assert metrics["generation_idle_fraction"] == pytest.approx((8 - 4) / 8)
    assert metrics["in_flight_bound"] == 2


@virtual
async def test_recycled_and_dropped_groups_and_their_tokens_by_reason(monkeypatch):
    """One stale, one aborted, one filtered, one at the end of its retries, one good: 2 tokens each."""
    source = FakeDataSource()
    tired = finished(3, versions=("1",))
    tired[0][0].fully_async_retries = 8
    pairs = [
        finished(0, versions=("1",)),
        finished(1, versions=("9",), status=Sample.Status.ABORTED),
        finished(2, versions=("9",), reward=0.0),
        tired,
        finished(4, versions=("9",)),
    ]
    async with fed_by_hand(monkeypatch, *pairs, data_source=source, rollout_batch_size=1, max_weight_staleness=2) as fn:
        fn._dynamic_filter = lambda args, group: bool(group[0].reward)
        fn._weight_version = FakeWeightVersion(9)
        output = await fn(train())
    assert group_indexes(output.samples) == [4]
    assert wasted(output.metrics) == {
        "groups_recycled_stale": 1,
        "groups_recycled_aborted": 1,
        "groups_dropped_filtered": 1,
        "groups_dropped_max_retries": 1,
        "tokens_wasted_stale": 2,
        "tokens_wasted_aborted": 2,
        "tokens_wasted_filtered": 2,
        "tokens_wasted_max_retries": 2,
    }
    assert fully_async(output.metrics)["groups_pulled"] == 5


@virtual
async def test_with_the_handler_drop_what_is_aborted_or_stale_is_dropped_under_its_reason(monkeypatch):
    """Two aborted groups, one stale and one good: 2 tokens each."""
    pairs = [
        finished(0, versions=("9",), status=Sample.Status.ABORTED),
        finished(1, versions=("1",)),
        finished(2, versions=("9",), status=Sample.Status.ABORTED),
        finished(3, versions=("9",)),
    ]
    async with fed_by_hand(
        monkeypatch, *pairs, rollout_batch_size=1, max_weight_staleness=2, async_unused_samples_handler="drop"
    ) as fn:
        fn._weight_version = FakeWeightVersion(9)
        output = await fn(train())
    assert group_indexes(output.samples) == [3]
    assert wasted(output.metrics) == {
        "groups_dropped_aborted": 2,
        "groups_dropped_stale": 1,
        "tokens_wasted_aborted": 4,
        "tokens_wasted_stale": 2,
    }


class Choosy:
    """A store that gives up groups 0 and 3 for good, and hands out the others."""

    def __init__(self, input: DataBufferConstructorInput) -> None:
        self.input = input
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    async def put(self, item: DataBufferInput) -> None:
        if item.prompt_group[0].group_index in (0, 3):
            self.input.unused_handler_fn(item.prompt_group)
        else:
            self.queue.put_nowait(item)

    async def get(self, **context: Any) -> Any:
        return await self.queue.get()

    def get_metrics(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        # a retried group comes again at once, and is refused again: 0 twice, then it has used up its one retry
        ("retry", {"groups_recycled_unused": 1, "groups_dropped_max_retries": 1}),
        ("drop", {"groups_dropped_unused": 1}),
    ],
)
def test_groups_that_a_custom_store_refuses_are_unused(monkeypatch, handler, expected):
    """One group in flight at a time, batches of one: groups 0 and 1 come, and 0 is refused."""

    @virtual
    async def run() -> dict[str, Any]:
        generate = TimedGeneration(g0=1, g1=2)
        args = {"rollout_batch_size": 1, "async_max_concurrent_samples": 2, "async_max_group_retries": 1}
        with function_registry.temporary("choosy", Choosy):
            async with running(
                monkeypatch,
                generate,
                **args,
                async_unused_samples_handler=handler,
                custom_async_data_buffer_path="choosy",
            ) as fn:
                output = await fn(train())
                assert group_indexes(output.samples) == [1]
                found.update(wasted(output.metrics))

    found: dict[str, Any] = {}
    run()
    assert found == expected  # group 0 has answers of 0 tokens


@virtual
async def test_groups_that_were_in_flight_in_a_restored_state_are_recycled_in_the_first_step(monkeypatch):
    """The state has two groups in flight and one queued; the first step after it reports two, the second none."""
    generation = GatedGeneration()
    async with running(monkeypatch, generation, rollout_batch_size=1, async_max_concurrent_samples=6) as fn:
        call = asyncio.create_task(fn(train(0)))
        await settle()
        generation.finish(0, 1)
        await call
        fn.acknowledge(0)
        await settle()
        state = fn.snapshot()
        in_flight = fn.ledger.in_flight
        assert fn.queue_size == 1
    generation = GatedGeneration()
    async with running(monkeypatch, generation, rollout_batch_size=1, async_max_concurrent_samples=6) as fn:
        fn.restore(state)
        first = fully_async((await fn(train(1))).metrics)
        await settle()
        generation.finish(*generation.running[:1])
        second = fully_async((await fn(train(2))).metrics)
    assert (first["groups_recycled_restored"], second["groups_recycled_restored"]) == (in_flight, 0)
    assert first["tokens_wasted_restored"] == 0  # what they had written by then is not known


@virtual
async def test_counts_belong_to_one_step_also_where_a_call_was_cancelled_between(monkeypatch):
    pairs = [finished(0, versions=("1",)), finished(1, versions=("9",))]
    async with fed_by_hand(monkeypatch, *pairs, max_weight_staleness=2) as fn:
        fn._weight_version = FakeWeightVersion(9)
        call = asyncio.create_task(fn(train()))
        await asyncio.sleep(5)
        call.cancel()
        await asyncio.wait({call})
        await asyncio.sleep(2)  # nobody waits
        fn._output.put_nowait(finished(2, versions=("9",)))
        first = (await fn(train())).metrics
        assert wasted(first) == {"groups_recycled_stale": 1, "tokens_wasted_stale": 2}
        assert fully_async(first)["consumer_wait_seconds"] == pytest.approx(5)
        for pair in (finished(3, versions=("9",)), finished(4, versions=("9",))):
            fn._output.put_nowait(pair)
        second = (await fn(train())).metrics
        assert wasted(second) == {} and fully_async(second)["consumer_wait_seconds"] == 0
        assert (fully_async(first)["groups_pulled"], fully_async(second)["groups_pulled"]) == (3, 2)


@virtual
async def test_sample_retries_are_those_of_the_step(monkeypatch):
    pairs = [finished(i) for i in range(4)]
    async with fed_by_hand(monkeypatch, *pairs, rollout_batch_size=2) as fn:
        fn.state.sample_retries = 3
        assert fully_async((await fn(train(0))).metrics)["sample_retries"] == 3
        fn.state.sample_retries = 4
        assert fully_async((await fn(train(1))).metrics)["sample_retries"] == 1


@virtual
async def test_event_loop_lag_is_how_late_the_watch_was_called(monkeypatch):
    loop = asyncio.get_running_loop()
    watch = LoopLagWatch(warn_secs=1000.0)
    watch.start()  # the next tick is due at 0.05
    try:
        async with fed_by_hand(monkeypatch, finished(0), finished(1), rollout_batch_size=1) as fn:
            loop.advance(0.35)  # somebody blocks the loop
            await asyncio.sleep(0.001)
            metrics = fully_async((await fn(train(0))).metrics)
            assert metrics["event_loop_lag_max_seconds"] == pytest.approx(0.30)
            assert metrics["event_loop_lag_p99_seconds"] == pytest.approx(0.30)
            await asyncio.sleep(1)
            metrics = fully_async((await fn(train(1))).metrics)
            assert metrics["event_loop_lag_max_seconds"] == pytest.approx(0)
    finally:
        watch.close()


@virtual
async def test_staleness_is_split_where_only_the_engines_tell_their_version(monkeypatch):
    """Measured against the engines' 9: a group of versions 5 to 7 was 2 versions in flight and 2 in the queue."""
    async with fed_by_hand(
        monkeypatch, finished(0, versions=("5", "7")), finished(1, versions=("9",)), max_weight_staleness=9
    ) as fn:
        fn._weight_version = FakeWeightVersion(9)
        metrics = fully_async((await fn(train())).metrics)
    assert metrics["trained_avg_staleness"] == 2
    assert metrics["trained_staleness_in_flight_mean"] == 1
    assert metrics["trained_staleness_in_queue_mean"] == 1


def test_a_step_that_never_began_reports_zeros(monkeypatch):
    fn = build(monkeypatch)
    assert fn._activity.metrics(5.0)[PREFIX + "generation_idle_fraction"] == 0


def test_every_key_is_in_the_guide():
    page = (Path(__file__).parents[3] / "docs" / "user-guide" / "fully-async.md").read_text()
    written = set(re.findall(r"`([a-z_{},<>0-9]+)`", page))
    for key in list(written):
        for choices in re.findall(r"{.+?}", key):
            written |= {key.replace(choices, choice) for choice in choices.strip("{}").split(",")}
    by_reason = re.compile(r"^(groups_recycled|groups_dropped|tokens_wasted)_.*")
    assert {by_reason.sub(r"\1_<reason>", key) for key in FIXED | BY_DRIVER} <= written
    assert {*RECYCLE_REASONS, *DROP_REASONS} <= written


def test_the_trainer_is_idle_while_it_neither_trains_nor_publishes_nor_saves():
    """10 s: 3 s wait, 5 s training, 1 s update (engines paused for 0.4 s of it), 0.5 s save, 0.5 s evaluation."""
    metrics = {
        "perf/train_wait_time": 3.0,
        "perf/train_time": 5.0,
        "perf/update_weights_time": 1.0,
        "perf/weight_update_pause_seconds": 0.4,
        "perf/save_time": 0.5,
    }
    driver = fully_async(fully_async_driver_metrics(metrics, 10.0))
    assert driver == {"train_idle_fraction": pytest.approx(0.35), "weight_update_pause_seconds": 0.4}
    assert set(driver) == BY_DRIVER


def test_a_step_without_an_update_has_the_drivers_keys_too():
    driver = fully_async(fully_async_driver_metrics({"perf/train_time": 2.0}, 2.0))
    assert driver == {"train_idle_fraction": 0.0, "weight_update_pause_seconds": 0.0}
