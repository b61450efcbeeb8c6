"""Building a fully-async rollout function on fakes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import miles.rollout.fully_async_rollout as module
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput
from tests.fast.fakes import FakeDataSource, FakeGenerateState, generate_at_once, rollout_args

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest


def build(
    monkeypatch: pytest.MonkeyPatch, generate: Any = generate_at_once, data_source: Any = None, **args: Any
) -> module.FullyAsyncRolloutFn:
    """A rollout function that generates with `generate`; `args` are flags."""
    monkeypatch.setattr(module, "GenerateState", FakeGenerateState)
    monkeypatch.setattr(module, "generate_and_rm_group", generate)
    namespace = rollout_args(**args)
    source = data_source or FakeDataSource(namespace.n_samples_per_prompt)
    return module.FullyAsyncRolloutFn(RolloutFnConstructorInput(namespace, source))


@asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, generate: Any = generate_at_once, data_source: Any = None, **args: Any
) -> AsyncIterator[module.FullyAsyncRolloutFn]:
    """`build`, closed at the end."""
    fn = build(monkeypatch, generate, data_source, **args)
    try:
        yield fn
    finally:
        await fn.close()


@asynccontextmanager
async def fed_by_hand(
    monkeypatch: pytest.MonkeyPatch, *pairs: Any, data_source: Any = None, **args: Any
) -> AsyncIterator[module.FullyAsyncRolloutFn]:
    """A rollout function whose queue holds `pairs` and whose worker does nothing, for ever."""
    async with running(monkeypatch, data_source=data_source, **args) as fn:
        fn._output = asyncio.Queue()
        for pair in pairs:
            fn._output.put_nowait(pair)
        fn._worker = asyncio.create_task(asyncio.Event().wait(), name="idle worker")
        yield fn


def train(rollout_id: int = 0, weight_version: int | None = None) -> RolloutFnTrainInput:
    return RolloutFnTrainInput(rollout_id, weight_version)
