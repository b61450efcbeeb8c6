"""Stand-ins for what surrounds the rollout: generation state, data source, and generation under the test's control."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from miles.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

Group = list[Any]


def rollout_args(**overrides: Any) -> Namespace:
    """The attributes that the plug-in interface promises to the fully-async rollout, and no others."""
    values: dict[str, Any] = {
        "rollout_global_dataset": True,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "max_weight_staleness": None,
        "async_max_concurrent_samples": None,
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 30000,
    }
    return Namespace(**{**values, **overrides})


def prompt_group(group_index: int, size: int = 2) -> list[Sample]:
    """A fresh group, numbered as a data source does it."""
    return [
        Sample(group_index=group_index, index=group_index * size + i, prompt=f"prompt {group_index}")
        for i in range(size)
    ]


def answer(
    samples: list[Sample],
    *,
    versions: tuple[str, ...] = (),
    status: Sample.Status = Sample.Status.COMPLETED,
    reward: float | None = 1.0,
) -> list[Sample]:
    """Answer the samples in place, as generate functions do."""
    for sample in samples:
        sample.tokens = [1, 2, 3]
        sample.response = "yes"
        sample.response_length = 1
        sample.status = status
        sample.reward = reward
        sample.weight_versions = list(versions)
    return samples


def finished(group_index: int, size: int = 2, **how: Any) -> tuple[list[Sample], list[Sample]]:
    """A pair as the worker puts it on the queue: `(prompt_group, group)`, the same samples in both."""
    samples = prompt_group(group_index, size)
    return samples, answer(list(samples), **how)


def group_indexes(groups: list[Group]) -> list[int]:
    return [(member[0] if isinstance(member, list) else member).group_index for member, *_ in groups]


class FakeGenerateState:
    """What a generate function is called with."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.sampling_params: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 8}
        self.aborted = False

    def reset(self) -> None:
        self.aborted = False


class FakeDataSource:
    """Hands out numbered groups for ever, given-back ones first, and keeps a record of both.

    `pulled` and `added`: every group that was handed out and given back, in order. `error`: raised by the pull that
    comes after `error_after` others.
    """

    def __init__(self, group_size: int = 2, *, error: BaseException | None = None, error_after: int = 0) -> None:
        self.group_size = group_size
        self.pulled: list[list[Sample]] = []
        self.added: list[list[Sample]] = []
        self.buffer: list[list[Sample]] = []
        self._error = error
        self._error_after = error_after
        self._next_index = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [self._next_group() for _ in range(num_samples)]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.added.extend(samples)
        self.buffer.extend(samples)

    def save(self, rollout_id: int) -> None:
        raise AssertionError("the rollout function must not save the data source")

    def load(self, rollout_id: int | None = None) -> None:
        raise AssertionError("the rollout function must not load the data source")

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def _next_group(self) -> list[Sample]:
        if self._error is not None and len(self.pulled) >= self._error_after:
            raise self._error
        if self.buffer:
            group = self.buffer.pop(0)
        else:
            group = prompt_group(self._next_index, self.group_size)
            self._next_index += 1
        self.pulled.append(group)
        return group


class GatedGeneration:
    """A `generate_and_rm_group` in which each group waits until the test lets it end.

    `started`: group indexes in the order in which generation began; `running`: those that have not ended yet;
    `peak`: the most that ever ran at once; `cancelled`: those whose generation was cancelled.
    """

    def __init__(self) -> None:
        self.started: list[int] = []
        self.running: list[int] = []
        self.cancelled: list[int] = []
        self.peak = 0
        self.calls: list[dict[str, Any]] = []
        self._gates: dict[int, asyncio.Future[Callable[[list[Sample]], Group]]] = {}

    async def __call__(self, state: Any, group: list[Sample], **keywords: Any) -> Group:
        index = group[0].group_index
        assert index is not None
        self.calls.append({"state": state, **keywords})
        self.started.append(index)
        self.running.append(index)
        self.peak = max(self.peak, len(self.running))
        try:
            return (await self._gate(index))(group)
        except asyncio.CancelledError:
            self.cancelled.append(index)
            raise
        finally:
            self.running.remove(index)
            self._gates.pop(index, None)

    def finish(self, *group_indexes: int, make: Callable[[list[Sample]], Group] = answer) -> None:
        """Let these groups end with what `make` makes of their samples; by default every sample is answered."""
        for index in group_indexes:
            self._gate(index).set_result(make)

    def fail(self, group_index: int, error: BaseException) -> None:
        self._gate(group_index).set_exception(error)

    def _gate(self, index: int) -> asyncio.Future[Callable[[list[Sample]], Group]]:
        if index not in self._gates:
            self._gates[index] = asyncio.get_running_loop().create_future()
        return self._gates[index]


async def generate_at_once(state: Any, group: list[Sample], **keywords: Any) -> Group:
    """A `generate_and_rm_group` that answers every sample immediately."""
    return answer(group)


class FakeWeightVersion:
    """A `_weight_version`: what the engines report."""

    def __init__(self, version: int | None) -> None:
        self.version = version
        self.queries = 0

    async def get(self, args: Namespace) -> int | None:
        self.queries += 1
        return self.version
