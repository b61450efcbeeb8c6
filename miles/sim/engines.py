"""Simulated inference engines behind the generate-function seam, and the weight versions that they serve.

    generate_and_rm --GenerateFnInput--> EnginePool.generate --> the least busy engine that lives --> Request
                                                                                                        |
    weight update: pause (abort: partial answers come back; retract, in_place: they wait), new version, continue

A request is a number of tokens that are written at the engine's speed. It knows which version wrote which token, so
that a test can check what the samples claim.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_utils.generate_endpoint_utils import update_sample_from_response
from miles.sim.faults import FaultBook, Misbehaved, SimulatedError
from miles.sim.noise import heavy_tail, noise
from miles.sim.schedule import FaultKind
from miles.utils.http_errors import HttpConnectionError, HttpStatusError

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles.sim.schedule import Fault, Schedule
    from miles.sim.trace import Trace
    from miles.utils.types import Sample

URL = "http://simulated/generate"
TOKENS_PER_SECOND = 10.0
MEDIAN_TOKENS = 6.0
LONGEST_TOKENS = 300.0
HANG_SECONDS = 150.0  # after which even a hanging connection breaks
ALL_HANG_FACTOR = 75  # all engines together hang for that many times the fault's seconds
NO_ENGINE_SECONDS = 0.5
EVAL_GROUP = -1
"""Stands for the group index of evaluation's requests."""

_PLACES_OF_GENERATION = frozenset(
    {
        FaultKind.CONNECTION_LOST,
        FaultKind.HTTP_5XX,
        FaultKind.HANG,
        FaultKind.ABORTED,
        FaultKind.FAILED,
        FaultKind.STRAGGLER,
        FaultKind.GENERATE_RAISES,
        FaultKind.GENERATE_LEAKS_CANCELLATION,
        FaultKind.GENERATE_RETURNS_NONSENSE,
    }
)


class WeightVersions:
    """The labels of the published weights, in the order of their publication. Labels are numbers or hashes."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.current = 0  # how many updates the trainer has made

    def label(self, ordinal: int) -> int | str:
        if self._schedule.version_labels == "hash":
            return f"w{int(noise(self._schedule.seed, ordinal, 11) * 1e9):x}"
        return self._schedule.first_version + ordinal

    @property
    def current_label(self) -> int | str:
        return self.label(self.current)


@dataclass(eq=False)
class Request:
    """One answer in the making. `spans`: (version ordinal, tokens that it wrote), oldest first."""

    number: int
    group_index: int
    member: int
    tokens: float
    done: asyncio.Future[str]
    written: float = 0.0
    spans: list[tuple[int, float]] = field(default_factory=list)
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None
    hangs: bool = False

    def finish(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_result(reason)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Engine:
    """Writes tokens of all its requests side by side, at `speed` tokens a second each."""

    def __init__(self, number: int, version: int) -> None:
        self.number = number
        self.version = version
        self.speed = TOKENS_PER_SECOND
        self.alive = True
        self.paused = False  # by a weight update
        self.hangs = False
        self.requests: dict[int, Request] = {}

    @property
    def writes(self) -> bool:
        return not (self.paused or self.hangs)

    def add(self, request: Request) -> None:
        self.requests[request.number] = request
        if self.writes:
            self._go(request)

    def remove(self, request: Request) -> None:
        if self.requests.pop(request.number, None) is not None and self.writes:
            self._halt(request)

    def set(self, *, paused: bool | None = None, hangs: bool | None = None) -> None:
        wrote = self.writes
        self.paused = self.paused if paused is None else paused
        self.hangs = self.hangs if hangs is None else hangs
        if wrote == self.writes:
            return
        for request in self.requests.values():
            (self._halt if wrote else self._go)(request)

    def change_speed(self, speed: float) -> None:
        for request in self.requests.values() if self.writes else ():
            self._halt(request)
        self.speed = speed
        for request in self.requests.values() if self.writes else ():
            self._go(request)

    def shorten(self, request: Request) -> None:
        if self.writes:
            self._halt(request)
        request.tokens = min(request.tokens, request.written + MEDIAN_TOKENS)
        if self.writes:
            self._go(request)

    def abort_all(self) -> None:
        for request in () if self.hangs else self.requests.values():
            request.finish("abort")

    def die(self) -> None:
        self.alive = False
        for request in list(self.requests.values()):
            request.fail(connection_lost())

    def _go(self, request: Request) -> None:
        loop = asyncio.get_running_loop()
        request.since = loop.time()
        if not request.hangs:
            left = max(0.0, request.tokens - request.written) / self.speed
            request.timer = loop.call_later(left, request.finish, "stop")

    def _halt(self, request: Request) -> None:
        if request.timer is not None:
            request.timer.cancel()
        wrote = (asyncio.get_running_loop().time() - request.since) * self.speed
        request.written += wrote
        if wrote > 0:
            request.spans.append((self.version, wrote))


def connection_lost() -> HttpConnectionError:
    return HttpConnectionError(url=URL, method="POST", attempts=1, elapsed=0.0, reason="connection lost")


def server_error(status: int) -> HttpStatusError:
    return HttpStatusError(url=URL, method="POST", attempts=1, elapsed=0.0, status=status, body="simulated")


class EnginePool:
    """The engines and their router: the run's generate function."""

    def __init__(self, schedule: Schedule, versions: WeightVersions, faults: FaultBook, trace: Trace) -> None:
        self.schedule = schedule
        self.versions = versions
        self.faults = faults
        self.trace = trace
        self.engines = [Engine(i, versions.current) for i in range(schedule.engines)]
        self.running = 0
        self.in_generation: Counter[int] = Counter()  # calls by group index
        self.evaluating = 0
        self.eval_fails_at: int | None = None  # the index of the evaluation's sample that raises
        self.answers: dict[str, Request] = {}
        self.report_fatal: Callable[[BaseException], None] = lambda error: None
        self.report_begin: Callable[[int], None] = lambda group_index: None
        self._attempts: dict[tuple[int, int], int] = {}
        self._requests = 0

    async def generate(self, input: GenerateFnInput) -> Any:
        """Answer `input.sample` in place, or fail as the schedule says."""
        if input.evaluation:
            return await self._answer_eval(input)
        sample = input.sample
        group_index, member = place_of(sample, self.schedule)
        if sample.tokens or sample.response or sample.weight_versions or sample.reward is not None:
            self.trace.violate(f"group {group_index} member {member} is generated anew and still carries an answer")
        self.running += 1
        self.in_generation[group_index] += 1
        self.report_begin(group_index)
        self.trace.add("generate", group_index, member)
        try:
            return await self._answer(input, group_index, member)
        finally:
            self.running -= 1
            self.in_generation[group_index] -= 1

    async def _answer_eval(self, input: GenerateFnInput) -> GenerateFnOutput:
        """Answer a sample of an evaluation; its faults are those of the engines, and `eval_fails_at`."""
        index = input.sample.index or 0
        self.evaluating += 1
        try:
            request = self._new_request(EVAL_GROUP, index, noise(self.schedule.seed, self._requests, 6))
            if index == self.eval_fails_at:
                request.tokens = 1
            reason = await self._run(request)
            if index == self.eval_fails_at:
                raise SimulatedError(f"evaluation fails at sample {index}")
            await self._write(input.sample, input, request, reason)
            return GenerateFnOutput(samples=input.sample)
        finally:
            self.evaluating -= 1

    async def _answer(self, input: GenerateFnInput, group_index: int, member: int) -> Any:
        attempt = self._attempts[group_index, member] = self._attempts.get((group_index, member), -1) + 1
        fault = self.faults.at_sample(group_index, member, _PLACES_OF_GENERATION)
        kind = fault.kind if fault is not None else None
        if fault is not None and kind in _FAILS_BEFORE_THE_ENGINE:
            await asyncio.sleep(fault.seconds / 10)
            return self._fail(fault)
        request = self._request(group_index, member, attempt, fault)
        reason = await self._run(request)
        status = {FaultKind.ABORTED: "abort"}.get(kind, reason) if kind is not None else reason
        await self._write(input.sample, input, request, status)
        if kind is FaultKind.FAILED:
            input.sample.status = type(input.sample).Status.FAILED
        self.trace.add("answer", group_index, member, input.sample.status.value, f"r{request.number}")
        if self.schedule.nested and noise(self.schedule.seed, group_index, member, 5) < 0.3:
            return GenerateFnOutput(samples=[input.sample, copy.copy(input.sample)])
        return GenerateFnOutput(samples=input.sample)

    def _fail(self, fault: Fault) -> Any:
        if fault.kind is FaultKind.CONNECTION_LOST:
            raise connection_lost()
        if fault.kind is FaultKind.HTTP_5XX:
            raise server_error(500 + fault.member % 4)
        if fault.kind is FaultKind.GENERATE_RAISES:
            error = SimulatedError(f"{fault}")
            self.report_fatal(error)
            raise error
        self.report_fatal(Misbehaved(f"{fault}"))
        if fault.kind is FaultKind.GENERATE_LEAKS_CANCELLATION:
            raise asyncio.CancelledError
        return None

    def _request(self, group_index: int, member: int, attempt: int, fault: Fault | None) -> Request:
        request = self._new_request(group_index, member, noise(self.schedule.seed, group_index, member, attempt, 1))
        if fault is not None and fault.kind is FaultKind.STRAGGLER:
            request.tokens *= 20
        request.hangs = fault is not None and fault.kind is FaultKind.HANG
        return request

    def _new_request(self, group_index: int, member: int, u: float) -> Request:
        alpha = 4.0 if self.faults.quiet else self.schedule.tail_alpha
        tokens = heavy_tail(u, median=MEDIAN_TOKENS, alpha=alpha, longest=LONGEST_TOKENS)
        self._requests += 1
        return Request(self._requests, group_index, member, tokens, asyncio.get_running_loop().create_future())

    async def _run(self, request: Request) -> str:
        living = [engine for engine in self.engines if engine.alive]
        if not living:
            await asyncio.sleep(NO_ENGINE_SECONDS)
            raise server_error(503)
        engine = min(living, key=lambda e: (len(e.requests), e.number))
        engine.add(request)
        try:
            if not request.hangs:
                return await request.done
            async with asyncio.timeout(HANG_SECONDS):
                return await request.done
        except TimeoutError as error:
            raise connection_lost() from error
        finally:
            engine.remove(request)

    async def _write(self, sample: Sample, input: GenerateFnInput, request: Request, reason: str) -> None:
        spans = request.spans or [(self.versions.current, 0.0)]
        name = f"r{request.number}"
        self.answers[name] = request
        output = {
            "text": name,
            "meta_info": {
                "finish_reason": {"type": reason},
                "output_token_logprobs": [(-0.5, 7)] * max(1, int(request.written / 10)),
                "weight_version": str(self.versions.label(spans[-1][0])),
                "weight_versions": [{"version": str(self.versions.label(ordinal))} for ordinal, _ in spans],
            },
        }
        await update_sample_from_response(input.args, sample, {"input_ids": [1, 2]}, output)

    def oldest_version(self, answer: str) -> int:
        """The ordinal of the oldest version that wrote a token of this answer."""
        return min((ordinal for ordinal, _ in self.answers[answer].spans), default=self.versions.current)

    # ---- what happens to the engines

    async def suffer(self) -> None:
        """Let engines die and slow down when their time comes, and recover."""
        loop = asyncio.get_running_loop()
        for at, fault, begins in self._weather():
            await asyncio.sleep(max(0.0, at - loop.time()))
            if self.faults.quiet:
                return
            engine = self.engines[fault.member % len(self.engines)]
            if begins:
                self.faults.fire(fault)
            if fault.kind is FaultKind.ENGINES_HANG:
                self.hang(begins)
            elif fault.kind is FaultKind.ENGINE_SLOW:
                engine.change_speed(TOKENS_PER_SECOND / 8 if begins else TOKENS_PER_SECOND)
            elif begins:
                engine.die()
            else:
                engine.alive = True

    def _weather(self) -> list[tuple[float, Fault, bool]]:
        changes = [
            change
            for fault in self.faults.timed
            if fault.kind in (FaultKind.ENGINE_DIES, FaultKind.ENGINE_SLOW, FaultKind.ENGINES_HANG)
            for change in ((fault.at, fault, True), (fault.at + _lasts(fault), fault, False))
        ]
        return sorted(changes, key=lambda change: change[0])

    def hurry(self) -> None:
        """Bad times are over: engines live and are fast, hanging connections break, stragglers end soon."""
        self.hang(False)
        for engine in self.engines:
            engine.alive = True
            engine.change_speed(TOKENS_PER_SECOND)
            for request in list(engine.requests.values()):
                if request.hangs:
                    request.fail(connection_lost())
                engine.shorten(request)

    def hang(self, hangs: bool) -> None:
        """All engines stop answering, or are as they were again: so they are after a restart of the run, too."""
        for engine in self.engines:
            engine.set(hangs=hangs)

    async def update_weights(self) -> None:
        """Pause, publish the next version on every engine, continue."""
        self.trace.add("update start", self.versions.current + 1, self.schedule.pause_mode)
        for engine in self.engines:
            if self.schedule.pause_mode == "abort":
                engine.abort_all()
            engine.set(paused=True)
        await asyncio.sleep(self.schedule.update_seconds)
        self.versions.current += 1
        for engine in self.engines:
            engine.version = self.versions.current
            engine.set(paused=False)
        self.trace.add("update end", self.versions.current)

    async def answer_router(self, url: str) -> dict[str, Any]:
        """What the router answers to the rollout's questions for its engines and for the weight version."""
        if url.endswith("/workers"):
            return {"workers": [{"url": f"engine-{i}"} for i in range(self.schedule.engines)]}
        return {"weight_version": str(self.versions.current_label)}


_FAILS_BEFORE_THE_ENGINE = frozenset(
    {
        FaultKind.CONNECTION_LOST,
        FaultKind.HTTP_5XX,
        FaultKind.GENERATE_RAISES,
        FaultKind.GENERATE_LEAKS_CANCELLATION,
        FaultKind.GENERATE_RETURNS_NONSENSE,
    }
)


def _lasts(fault: Fault) -> float:
    return fault.seconds * (ALL_HANG_FACTOR if fault.kind is FaultKind.ENGINES_HANG else 1)


def place_of(sample: Sample, schedule: Schedule) -> tuple[int, int]:
    """(group index, member) of a sample, as the data source numbered it."""
    assert sample.group_index is not None and sample.index is not None
    return sample.group_index, sample.index % schedule.n_samples_per_prompt
