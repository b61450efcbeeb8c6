"""What the fully-async rollout itself costs a prompt group: everything but generation and training.

    python benchmarks/heart.py [--groups 20000] [--rounds 5] [--memory-groups 100000]

Ready-made groups of 8 and a generate function that returns at once: submission, queue, drain, ledger and metrics of
`FullyAsyncRolloutFn`, one call and one acknowledgement for each batch of 64, with a weight version for each. The floor
is a bare task for each group that puts it on an asyncio.Queue, and a drain that gets it. "held": no group is generated
before all places are taken, so that 64 or 16,384 really are in flight at once; both sides wait for the same future.

Times are microseconds of CPU of this single-threaded process for each group; floor and rollout take turns, and the best
round of each counts, so that the ratios hold on a busy machine. Wanted: at most 4 times the floor. The last lines are
the process's memory over 100,000 groups (`--memory-groups 1000000` for a million), which must not grow. Takes about a
minute. `--groups 0` leaves the ratios out, `--memory-groups 0` the memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from miles.rollout import fully_async_rollout
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput
from miles.rollout.fully_async_rollout import FullyAsyncRolloutFn
from miles.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GROUP_SIZE = 8
BATCH_GROUPS = 64
READY_MADE = 2048  # distinct groups, handed out again and again: more than a processor's caches hold
IN_FLIGHT = (64, 16_384)
GRANULARITIES = ("group", "sample")
WANTED = 4.0
MEMORY_POINTS = 10

Group = list[Sample]


# --- what both sides are given ---


def ready_made(count: int = READY_MADE) -> list[Group]:
    """Finished groups."""
    return [[_sample(group, group * GROUP_SIZE + i) for i in range(GROUP_SIZE)] for group in range(count)]


def _sample(group_index: int, index: int) -> Sample:
    return Sample(
        group_index=group_index,
        index=index,
        prompt="question",
        tokens=list(range(32)),
        response="answer",
        response_length=16,
        reward=1.0,
        weight_versions=["1"],
        rollout_log_probs=[-0.5] * 16,
        status=Sample.Status.COMPLETED,
    )


class ReadyMadeSource:
    """A data source without an end."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups
        self._next = 0

    def get_samples(self, num_samples: int) -> list[Group]:
        group = self._groups[self._next]
        self._next = (self._next + 1) % len(self._groups)
        return [group]

    def add_samples(self, samples: list[Group]) -> None:
        raise AssertionError("nothing is recycled here")


class Wave:
    """Holds groups until `size` of them wait, then lets them all go. With size 0 nobody waits."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting = 0
        self._gate: asyncio.Future[None] | None = None

    async def passes(self) -> None:
        if not self._size:
            return
        if self._gate is None:
            self._gate = asyncio.get_running_loop().create_future()
        gate = self._gate
        self._waiting += 1
        if self._waiting == self._size:
            self._gate, self._waiting = None, 0
            gate.set_result(None)
            return
        await gate


# --- the two sides ---


class Floor:
    """A bare task for each group, an asyncio.Queue, a drain: as many groups at once as may be in flight."""

    def __init__(self, groups: list[Group], in_flight: int, *, held: bool) -> None:
        self._source = ReadyMadeSource(groups)
        self._in_flight = in_flight
        self._wave = Wave(in_flight if held else 0)

    def run(self, runner: asyncio.Runner, count: int) -> None:
        runner.run(self._run(count))

    async def _run(self, count: int) -> None:
        queue: asyncio.Queue[Group] = asyncio.Queue()
        for _ in range(-(-count // self._in_flight)):
            tasks = {
                asyncio.create_task(self._one(queue, self._source.get_samples(1)[0])) for _ in range(self._in_flight)
            }
            for _ in range(self._in_flight):
                await queue.get()
            del tasks

    def groups_of(self, count: int) -> int:
        return -(-count // self._in_flight) * self._in_flight

    async def _one(self, queue: asyncio.Queue[Group], group: Group) -> None:
        await queue.put(await self._generate(group))

    async def _generate(self, group: Group) -> Group:
        await self._wave.passes()
        return group

    def close(self, runner: asyncio.Runner) -> None: ...


class Heart:
    """The real rollout function."""

    def __init__(self, groups: list[Group], in_flight: int, granularity: str, *, held: bool) -> None:
        args = argparse.Namespace(
            rollout_global_dataset=True,
            rollout_batch_size=BATCH_GROUPS,
            n_samples_per_prompt=GROUP_SIZE,
            max_weight_staleness=None,
            async_max_concurrent_samples=in_flight * GROUP_SIZE,
            dynamic_sampling_filter_path=None,
            rollout_sample_filter_path=None,
            sglang_router_ip="127.0.0.1",
            sglang_router_port=30000,
            rollout_submission_granularity=granularity,
        )
        source: Any = ReadyMadeSource(groups)
        self.fn = FullyAsyncRolloutFn(RolloutFnConstructorInput(args=args, data_source=source))
        self._wave = Wave(in_flight if held else 0)
        self._rollout_id = 0

    def groups_of(self, count: int) -> int:
        return -(-count // BATCH_GROUPS) * BATCH_GROUPS

    def run(self, runner: asyncio.Runner, count: int) -> None:
        self._choose_generation()
        runner.run(self._run(count))

    async def _run(self, count: int) -> None:
        for _ in range(-(-count // BATCH_GROUPS)):
            output = await self.fn(RolloutFnTrainInput(rollout_id=self._rollout_id))
            assert len(output.samples) == BATCH_GROUPS
            assert output.metrics is not None
            self.fn.acknowledge(self._rollout_id)
            self._rollout_id += 1
            self.fn.on_weight_version(self._rollout_id)

    async def _generate(
        self, state: Any, group: Group, sample_done_callback: Callable[[], None] | None = None, **_: Any
    ) -> Group:
        await self._wave.passes()
        if sample_done_callback is not None:
            for _member in group:
                sample_done_callback()
        return group

    def close(self, runner: asyncio.Runner) -> None:
        self._choose_generation()
        runner.run(self.fn.close())

    def _choose_generation(self) -> None:
        """For this one's turn: tasks look it up when they start."""
        fully_async_rollout.generate_and_rm_group = self._generate  # type: ignore[assignment]


# --- measuring ---


def compare(groups: list[Group], in_flight: int, count: int, rounds: int, *, held: bool) -> dict[str, float]:
    """CPU seconds for one group: the floor's and both granularities', the best of `rounds` rounds of about `count`.

    They take turns, each on an event loop of its own, which stands still while it is another's turn.
    """
    best: dict[str, float] = {}
    with sides(groups, in_flight, held=held) as runners:
        for runner, side in runners.values():
            side.run(runner, max(BATCH_GROUPS, in_flight))
        for _ in range(rounds):
            for name, (runner, side) in runners.items():
                gc.collect()
                started = time.process_time()
                side.run(runner, count)
                seconds = (time.process_time() - started) / side.groups_of(count)
                best[name] = min(best.get(name, seconds), seconds)
    return best


@contextmanager
def sides(
    groups: list[Group], in_flight: int, *, held: bool, granularities: Sequence[str] = GRANULARITIES
) -> Iterator[dict[str, tuple[asyncio.Runner, Floor | Heart]]]:
    """Floor and rollout functions with their event loops; closed at the end."""
    original = fully_async_rollout.generate_and_rm_group
    runners: dict[str, tuple[asyncio.Runner, Floor | Heart]] = {
        "floor": (asyncio.Runner(), Floor(groups, in_flight, held=held)),
        **{name: (asyncio.Runner(), Heart(groups, in_flight, name, held=held)) for name in granularities},
    }
    try:
        yield runners
    finally:
        for runner, side in runners.values():
            side.close(runner)
            runner.close()
        fully_async_rollout.generate_and_rm_group = original


def memory_over(groups: list[Group], count: int, granularity: str = "sample", points: int = MEMORY_POINTS) -> list[int]:
    """Resident bytes before the first and after each of `points` equal parts of `count` groups."""
    with sides(groups, IN_FLIGHT[0], held=False, granularities=(granularity,)) as runners:
        runner, heart = runners[granularity]
        residents = []
        for _ in range(points + 1):  # in the first one, caches and free lists fill up
            heart.run(runner, count // points)
            residents.append(resident_bytes())
    return residents


def resident_bytes() -> int:
    import psutil

    gc.collect()
    return int(psutil.Process().memory_info().rss)


# --- the run ---


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=20_000, help="groups in one round; 0: memory alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-groups", type=int, default=100_000, help="0: ratios alone")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    groups = ready_made()
    gc.collect()
    gc.freeze()  # the ready-made groups belong to neither side
    ok = True
    if options.groups:
        for held in (False, True):
            for in_flight in IN_FLIGHT:
                result = compare(groups, in_flight, options.groups, options.rounds, held=held)
                ok &= _report(in_flight, held, result)
    if options.memory_groups:
        _report_memory(options.memory_groups, memory_over(groups, options.memory_groups))
    return 0 if ok else 1


def _report_memory(count: int, residents: list[int]) -> None:
    _say(f"resident MiB over {count} groups: {', '.join(f'{r / 2**20:.1f}' for r in residents)}")
    _say(f"  growth: {(residents[-1] - residents[0]) / count:.1f} bytes a group")


def _report(in_flight: int, held: bool, seconds: dict[str, float]) -> bool:
    ok = True
    _say(f"{in_flight} groups in flight{', held until all are' if held else ''}")
    _say(f"  floor     {1e6 * seconds['floor']:6.1f} us of CPU a group")
    for name in GRANULARITIES:
        ratio = seconds[name] / seconds["floor"]
        verdict = "ok" if ratio <= WANTED else "TOO SLOW"
        line = f"  by {name:6} {1e6 * seconds[name]:6.1f} us = {ratio:5.2f} x the floor"
        _say(f"{line} (wanted: at most {WANTED}) {verdict}")
        ok &= ratio <= WANTED
    return ok


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
