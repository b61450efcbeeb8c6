"""The engines of a run: started, registered with the router once they have current weights, watched, replaced.

    each engine:   start --> waits for weights --> [driver: update] --> registered, serves --> its end
                     ^                                                                           |
                     |        server or actor died, hangs, answers 5xx, failed a weight update --+
                     +-- pause <-- taken out of the router, killed: its requests fail at once and go elsewhere

    the driver:    begin_update --> engines to send weights to --> finish_update(version): those that waited serve now
                                                               |-> fail_update(engine): it is taken out; begin again

No engine gets a request before it has the weights of an update that it took part in. Who starts anew, who gives up and
when is decided in `engine_states`; without `--use-fault-tolerance` the first death ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from miles.ray.rollout.engine_states import EngineRef, EngineState, EngineStates, FleetView
from miles.ray.supervisor import original_error
from miles.ray.waits import first_of
from miles.utils.processes import ProcessDied
from miles.utils.trace import LOST, SERVES, UP, EngineEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miles.ray.rollout.engine import Engine
    from miles.ray.rollout.engine_health import HealthConfig

logger = logging.getLogger(__name__)

BLAME_SECS = 3.0
"""An engine that refuses a step of an update may do so because another one died; so much later that is known and
explained."""
EXPLAIN_SECS = 2.0
"""An engine that does not answer has most likely died; so much later it is known how, on a busy machine, too."""
LEAST_PATIENCE_SECS = 1.0
"""An engine that was silent before an update gets at least so long after it."""
_UNREGISTER_SECS = 5.0


class Registry(Protocol):
    """The router, as far as the fleet needs it."""

    async def add_engines(self, urls: list[str]) -> None:
        """Returns when the router sends them requests."""

    async def remove_engines(self, urls: list[str]) -> None:
        """Returns when no further request goes there. One that it does not know is no error."""


class Health(Protocol):
    """Questions to an engine; the answer is what is wrong, or None."""

    async def fails_to_generate(self, url: str, patience_secs: float) -> str | None: ...

    async def fails_requests(self, url: str) -> str | None: ...

    async def fails_to_answer(self, url: str) -> str | None: ...


@dataclass(frozen=True)
class _Life:
    """What others can do about one life of an engine: sentence it to death, and wait until it is over."""

    ref: EngineRef
    sentence: asyncio.Future[str]
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def condemn(self, reason: str) -> None:
        if not self.sentence.done():
            self.sentence.set_result(reason)


class EngineFleet:
    """See the module docstring. `make_engine(i)` gives a new engine in the place of the last one with this index;
    `looks`: how often engines are looked at, None for never."""

    def __init__(
        self,
        make_engine: Callable[[int], Engine],
        count: int,
        router: Registry,
        health: Health,
        *,
        looks: HealthConfig | None,
        tolerates_faults: bool,
    ) -> None:
        self._make_engine = make_engine
        self._router = router
        self._health = health
        self._looks = looks
        self._engines = [make_engine(i) for i in range(count)]
        self._states = EngineStates(count, restarts_engines=tolerates_faults)
        self._tasks: list[asyncio.Task[None]] = []
        self._lives: dict[EngineRef, _Life] = {}
        self._fatal: asyncio.Future[str] | None = None
        self._updating: tuple[EngineRef, ...] = ()
        self._update_begins, self._update_is_over = asyncio.Event(), asyncio.Event()
        self._events: list[EngineEvent] = []
        self._told_pids: dict[str, int] = {}
        self._pids: dict[str, int] = {}

    # -- start and end

    async def start(self) -> None:
        """Bring up every engine. Raises what the first failure raises: before a run has begun nothing is repeated."""
        self._fatal = asyncio.get_running_loop().create_future()
        urls = await asyncio.gather(*(engine.start() for engine in self._engines))
        for index, url in enumerate(urls):
            life = await self._came_up(index, url)
            self._tasks.append(asyncio.create_task(self._live(life), name=f"life of {self._engines[index].name}"))

    async def watch(self) -> None:
        """Never returns; raises ProcessDied when the run cannot go on."""
        assert self._fatal is not None, "watch follows start"
        raise ProcessDied(await asyncio.shield(self._fatal))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(engine.stop() for engine in self._engines), return_exceptions=True)

    # -- what the driver asks and tells

    def view(self) -> FleetView:
        """The engines as they are now, and what has happened since the last view."""
        events, self._events = tuple(self._events), []
        pids = self._pids if self._pids != self._told_pids else {}
        self._told_pids = dict(self._pids)
        return FleetView(
            serving=self._states.in_state(EngineState.SERVING),
            waiting=self._states.in_state(EngineState.WAITING),
            restarts=self._states.restarts,
            events=events,
            pids=dict(pids),
        )

    async def pids(self) -> dict[str, int]:
        """Process ids by name, of all engines."""
        return dict(self._pids)

    def begin_update(self, *, only_waiting: bool = False) -> tuple[EngineRef, ...]:
        """The engines that the next update goes to: all that are up, or those that have no current weights yet.

        From here to `finish_update` they may be paused and are not expected to generate. Raises ProcessDied where the
        run cannot go on.
        """
        if self._fatal is not None and self._fatal.done():
            raise ProcessDied(self._fatal.result())
        self._updating = self._states.in_state(EngineState.WAITING) if only_waiting else self._states.up
        self._update_begins.set()
        self._update_begins, self._update_is_over = asyncio.Event(), asyncio.Event()
        return self._updating

    async def finish_update(self, engines: Sequence[EngineRef]) -> None:
        """These engines have the current weights: those that waited for them get requests from now on."""
        self._updating = ()
        self._update_is_over.set()
        waiting = set(self._states.in_state(EngineState.WAITING))
        lives = [self._lives[ref] for ref in engines if ref in waiting]
        await asyncio.gather(*(self._register(life) for life in lives))

    async def fail_update(
        self, engines: Sequence[EngineRef], urls: Sequence[str], reason: str, *, answered: bool
    ) -> None:
        """The update to `engines` failed at those with these URLs; the ones that are at fault are taken out.

        An engine that gave no answer is at fault itself. One that answered with an error may have been the first to
        tell that another one has gone.
        """
        lives = [self._lives[ref] for ref in engines if ref in self._lives]
        if len(lives) == len(engines):
            patience_secs = BLAME_SECS if answered else EXPLAIN_SECS
            await first_of((life.over.wait() for life in lives), timeout_secs=patience_secs)
        another_died = len(lives) < len(engines) or any(life.over.is_set() for life in lives)
        if answered and another_died:
            return
        for life in lives:
            if life.ref.url in urls:
                life.condemn(f"{self._engines[life.ref.index].name}: {reason}")
                await life.over.wait()

    # -- the life of one engine

    async def _live(self, life: _Life | None) -> None:
        try:
            while life is not None:
                life = await self._replace(life, await self._end_of(life))
        except Exception as error:  # a fault of ours: an engine that nobody looks after must not go unnoticed
            logger.exception("an engine is no longer looked after")
            self._stop_run(f"an engine is no longer looked after: {_reason(error)}")

    async def _end_of(self, life: _Life) -> str:
        """Wait for the end of this life, whatever ends it, and say what it was: how it died, where it has died."""
        death = asyncio.ensure_future(_death_of(self._engines[life.ref.index]))
        try:
            seen: str = await first_of((_result(death), self._sickness_of(life.ref), _result(life.sentence)))
            await asyncio.wait([death], timeout=EXPLAIN_SECS)
            return death.result() if death.done() else seen
        finally:
            death.cancel()
            await asyncio.gather(death, return_exceptions=True)

    async def _sickness_of(self, ref: EngineRef) -> str:
        looks = self._looks
        if looks is None:
            return await asyncio.get_running_loop().create_future()
        await asyncio.sleep(looks.first_wait_secs)
        while True:
            await asyncio.sleep(looks.interval_secs)
            failure = await self._look_at(ref, looks)
            if failure is not None:
                return f"{self._engines[ref.index].name} ({ref.url}) {failure}"

    async def _look_at(self, ref: EngineRef, looks: HealthConfig) -> str | None:
        """One look: what is wrong, or None.

        An update that begins meanwhile interrupts it, for the engine is paused then. The look goes on afterwards, and
        the engine has been silent for as long as it was before the update: otherwise one that never generates would
        not be found while updates follow each other faster than the timeout.
        """
        health, clock, patience_secs = self._health, asyncio.get_running_loop().time, looks.timeout_secs
        while True:
            while ref in self._updating:
                failure = await health.fails_to_answer(ref.url)
                if failure is not None:
                    return failure
                await first_of([self._update_is_over.wait()], timeout_secs=looks.interval_secs)
            begins, started = self._update_begins, clock()
            failure = await first_of((health.fails_to_generate(ref.url, patience_secs), begins.wait()))
            if begins.is_set():
                patience_secs = max(patience_secs - (clock() - started), LEAST_PATIENCE_SECS)
                continue
            if failure is None:
                failure = await first_of((health.fails_requests(ref.url), begins.wait()))
            return None if begins.is_set() else failure

    async def _replace(self, life: _Life, reason: str) -> _Life | None:
        """Take a dead engine out and start another one in its place; None where the run cannot go on."""
        index, clock = life.ref.index, asyncio.get_running_loop().time
        died = clock()
        name = self._engines[index].name
        while True:
            verdict = self._states.died(index, name, reason)
            life.over.set()
            self._lives.pop(life.ref, None)
            logger.warning("engine lost: %s", reason)
            if verdict.fatal is not None:
                self._stop_run(verdict.fatal)
                return None
            self._note(index, LOST, f"{_first_line(reason)}; its samples go elsewhere and it is started again")
            await self._bury(life.ref)
            await asyncio.sleep(verdict.pause_secs)
            self._states.starting(index)
            self._engines[index] = self._make_engine(index)
            try:
                new = await self._came_up(index, await self._engines[index].start())
            except Exception as error:  # whatever it is: another start, or the run's end, follows from it
                reason = _reason(error)
                continue
            self._note(index, UP, f"{name} is up again after {clock() - died:.0f} s and waits for weights")
            return new

    async def _came_up(self, index: int, url: str) -> _Life:
        self._pids |= await self._engines[index].pids()
        life = _Life(self._states.started(index, url), asyncio.get_running_loop().create_future())
        self._lives[life.ref] = life
        return life

    async def _bury(self, ref: EngineRef) -> None:
        """Out of the router, so that nothing new goes there; then dead, so that nothing waits for it."""
        await self._unregister(ref)
        self._engines[ref.index].kill()

    # -- small steps

    async def _register(self, life: _Life) -> None:
        name, url = self._engines[life.ref.index].name, life.ref.url
        try:
            await self._router.add_engines([url])
        except Exception as error:  # of this engine or of the router; the latter ends the run by itself
            life.condemn(f"{name} ({url}) could not be registered with the router: {_reason(error)}")
            return
        if life.over.is_set():
            await self._unregister(life.ref)
            return
        self._states.serving(life.ref)
        if life.ref.life > 1:
            self._note(life.ref.index, SERVES, f"{name} has the current weights and serves again")

    async def _unregister(self, ref: EngineRef) -> None:
        try:
            async with asyncio.timeout(_UNREGISTER_SECS):
                await self._router.remove_engines([ref.url])
        except Exception as error:  # a router that is gone ends the run by itself
            logger.warning("%s was not taken out of the router: %r", ref.url, error)

    def _note(self, index: int, what: str, text: str) -> None:
        self._events.append(EngineEvent(index, what, time.time(), text))

    def _stop_run(self, reason: str) -> None:
        if self._fatal is not None and not self._fatal.done():
            self._fatal.set_result(reason)


async def _death_of(engine: Engine) -> str:
    try:
        await engine.watch()
    except Exception as error:  # ProcessDied, or what else has ended the watching: it is the reason
        return _reason(error)
    return f"{engine.name} is no longer watched"


def _reason(error: BaseException) -> str:
    cause = original_error(error) or error
    return str(cause) if isinstance(cause, ProcessDied) else f"{type(cause).__name__}: {cause}"


async def _result(future: asyncio.Future[str]) -> str:
    """It outlives whoever stops waiting for it."""
    return await asyncio.shield(future)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
