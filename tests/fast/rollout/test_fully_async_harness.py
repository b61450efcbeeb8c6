"""A harness as somebody else writes it: their own fakes, the promised module attributes, an ordinary event loop.

Nothing here uses this project's fakes or more of the rollout function than the plug-in interface promises.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from argparse import Namespace

import pytest

from miles.rollout import fully_async_rollout
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput
from miles.utils import async_utils
from miles.utils.types import Sample


class State:
    def __init__(self, args):
        self.args = args
        self.sampling_params = {"temperature": 0.7}


class Prompts:
    def __init__(self):
        self.count = 0
        self.returned = []

    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            groups.append([Sample(index=self.count * 2 + i, group_index=self.count) for i in range(2)])
            self.count += 1
        return groups

    def add_samples(self, groups):
        self.returned += groups


def make_args(**changes):
    args = Namespace(
        rollout_global_dataset=True,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        max_weight_staleness=None,
        async_max_concurrent_samples=None,
        dynamic_sampling_filter_path=None,
        rollout_sample_filter_path=None,
        sglang_router_ip="localhost",
        sglang_router_port=1,
    )
    vars(args).update(changes)
    return args


async def generate(state, group, sampling_params, evaluation=False):
    assert evaluation is False
    assert sampling_params == {"temperature": 0.7}
    for sample in group:
        sample.status = Sample.Status.COMPLETED
        sample.response = "ok"
        sample.weight_versions.append("3")
    return group


def make_fn(monkeypatch, **changes):
    monkeypatch.setattr(fully_async_rollout, "GenerateState", State)
    monkeypatch.setattr(fully_async_rollout, "generate_and_rm_group", generate)
    return fully_async_rollout.FullyAsyncRolloutFn(RolloutFnConstructorInput(make_args(**changes), Prompts()))


def pair(index, versions=("3",)):
    samples = [
        Sample(index=index * 2 + i, status=Sample.Status.COMPLETED, weight_versions=list(versions)) for i in range(2)
    ]
    return samples, samples


async def test_runs_with_the_promised_attributes_alone(monkeypatch):
    fn = make_fn(monkeypatch)
    output = await fn(RolloutFnTrainInput(rollout_id=0))
    assert [group[0].index for group in output.samples] == [0, 2]
    await fn.close()


async def test_generation_replaced_after_construction_is_used(monkeypatch):
    fn = make_fn(monkeypatch)

    async def fail(state, group, sampling_params, evaluation=False):
        raise LookupError("replaced")

    monkeypatch.setattr(fully_async_rollout, "generate_and_rm_group", fail)
    with pytest.raises(LookupError, match="replaced"):
        await fn(RolloutFnTrainInput(rollout_id=0))
    await fn.close()


@pytest.mark.parametrize("how", ["call", "drain"])
async def test_queue_and_worker_set_by_hand(monkeypatch, how):
    fn = make_fn(monkeypatch)
    fn._output = asyncio.Queue()
    fn._worker = asyncio.create_task(asyncio.sleep(3600))
    await fn._output.put(pair(1))
    await fn._output.put(pair(0))
    output = await (fn(RolloutFnTrainInput(rollout_id=0)) if how == "call" else fn._drain())
    assert [group[0].index for group in output.samples] == [0, 2]
    assert fn.data_source.count == 0
    fn._worker.cancel()


async def test_failed_worker_set_by_hand(monkeypatch):
    async def fail():
        raise RuntimeError("worker died")

    fn = make_fn(monkeypatch, rollout_batch_size=1)
    fn._output = asyncio.Queue()
    fn._output.put_nowait(pair(0))
    fn._worker = asyncio.create_task(fail())
    with pytest.raises(RuntimeError, match="worker died"):
        await asyncio.wait_for(fn(RolloutFnTrainInput(rollout_id=0)), timeout=5)


async def test_version_through_the_replaced_get_and_recycling(monkeypatch):
    urls = []

    async def fake_get(url):
        urls.append(url)
        return {"weight_version": "5"}

    monkeypatch.setattr(fully_async_rollout, "get", fake_get)
    fn = make_fn(monkeypatch, max_weight_staleness=1, rollout_batch_size=1)
    fn._output = asyncio.Queue()
    fn._worker = asyncio.create_task(asyncio.sleep(3600))
    stale, fresh = pair(0, versions=["3", "5"]), pair(1, versions=["4"])
    fn._output.put_nowait(stale)
    fn._output.put_nowait(fresh)
    output = await fn(RolloutFnTrainInput(rollout_id=0))
    assert output.samples == [fresh[1]]
    assert fn.data_source.returned == [stale[0]]
    assert output.metrics["rollout/fully_async/stale_groups_recycled"] == 1
    assert output.metrics["rollout/fully_async/avg_staleness"] == 1.5
    assert output.metrics["rollout/fully_async/max_staleness"] == 2
    assert len(urls) == 1
    assert urls[0].startswith("http://localhost:1/")
    fn._worker.cancel()


async def test_dead_router_is_asked_once_per_ttl(monkeypatch):
    calls = 0

    async def down(url):
        nonlocal calls
        calls += 1
        raise ConnectionError("down")

    monkeypatch.setattr(fully_async_rollout, "get", down)
    cached = fully_async_rollout._CachedWeightVersion(60)
    args = make_args()
    assert [await cached.get(args) for _ in range(3)] == [None, None, None]
    assert calls == 1


async def test_replaced_filters_and_version(monkeypatch):
    class Version:
        async def get(self, args):
            return 9

    fn = make_fn(monkeypatch, max_weight_staleness=6, rollout_batch_size=1)
    fn._output = asyncio.Queue()
    fn._worker = asyncio.create_task(asyncio.sleep(3600))
    fn._weight_version = Version()
    fn._dynamic_filter = lambda args, group, **kwargs: group[0].index != 0
    fn._sample_filter = lambda args, data: setattr(data[0][1], "remove_sample", True)
    fn._output.put_nowait(pair(0))
    fn._output.put_nowait(pair(1))
    output = await fn(RolloutFnTrainInput(rollout_id=0))
    assert [sample.remove_sample for sample in output.samples[0]] == [False, True]
    assert output.metrics["rollout/fully_async/avg_staleness"] == 6
    fn._worker.cancel()


async def test_short_warning_interval(monkeypatch, caplog):
    monkeypatch.setattr(fully_async_rollout, "NO_PROGRESS_WARN_SECS", 0.01)
    fn = make_fn(monkeypatch, rollout_batch_size=1)
    fn._output = asyncio.Queue()
    fn._worker = asyncio.create_task(asyncio.sleep(3600))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fn(RolloutFnTrainInput(rollout_id=0)), timeout=0.1)
    assert "0 of 1 groups kept" in caplog.text
    fn._worker.cancel()


def test_from_a_blocking_caller_over_the_shared_loop(monkeypatch):
    fn = make_fn(monkeypatch)
    try:
        first = async_utils.run(fn(RolloutFnTrainInput(rollout_id=0)))
        second = async_utils.run(fn(RolloutFnTrainInput(rollout_id=1)))
        assert [group[0].index for group in first.samples + second.samples] == [0, 2, 4, 6]
        async_utils.run(fn.close())
        async_utils.run(fn.close())
    finally:
        async_utils.close_async_loop()


def test_importing_the_module_stays_light():
    heavy = ("torch", "ray", "transformers", "sglang", "megatron", "numpy", "pandas", "datasets")
    code = f"import sys, miles.rollout.fully_async_rollout\nprint([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
