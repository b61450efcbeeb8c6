"""The event loop's side of the engine: who waits for which request.

Consumes: parsed /generate bodies; events from the engine thread, one loop callback for each step that has any. Waits
for: nothing. Produces: completed `Answer`s. All of it runs on the event loop, except `deliver_from_thread`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from functools import partial
from typing import TYPE_CHECKING, Any

from miles.backends.embedded_engine.detokenize import IncrementalText, hold_back_partial_stop
from miles.backends.embedded_engine.errors import RequestError, Unavailable
from miles.backends.embedded_engine.output import final_text, sequence_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from miles.backends.embedded_engine.engine_thread import EngineThread
    from miles.backends.embedded_engine.generate_body import GenerateBody
    from miles.backends.embedded_engine.request import Request
    from miles.backends.embedded_engine.scheduler import Event, Scheduler
    from miles.backends.embedded_engine.tokenizer import Tokenizer


SEEDS_APART = 1_000_000_007
"""Distance of two engines' first seeds whose random_seed differs by one."""


class Answer:
    """What one /generate call waits for: its sequences, by index."""

    def __init__(self, body: GenerateBody, tokenizer: Tokenizer | None, engine_url: str | None = None) -> None:
        self.body = body
        self._engine_url = engine_url
        self._tokenizer = tokenizer
        self._unfinished = len(body.requests)
        self._final: list[Event | None] = [None] * len(body.requests)
        self._news: dict[int, Event] = {}
        self._changed = asyncio.Event()
        self._texts: dict[int, IncrementalText] = {}
        self._failure: Unavailable | None = None

    @property
    def done(self) -> bool:
        return self._unfinished == 0

    def take(self, event: Event) -> None:
        index = event.request.index
        if event.finished:
            self._final[index] = event
            self._unfinished -= 1
        if self.body.stream:
            self._news[index] = event
            self._changed.set()
        elif self.done:
            self._changed.set()

    def fail(self, error: Unavailable) -> None:
        self._failure = error
        self._changed.set()

    async def json(self) -> Any:
        """Wait for all sequences; the response of a call that does not stream.

        Raises Unavailable if the engine ends meanwhile.
        """
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        sequences = [self._sequence(event) for event in self._final if event is not None]
        return sequences if self.body.is_list else sequences[0]

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a call that streams: cumulative, the newest of each sequence (a slow reader skips some)."""
        ended = 0
        while ended < len(self._final):
            await self._changed.wait()
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            news, self._news = self._news, {}
            for index, event in news.items():
                ended += event.finished
                chunk = self._sequence(event)
                yield {**chunk, "index": index} if self.body.is_list else chunk

    def _sequence(self, event: Event) -> dict[str, Any]:
        if event.finished:
            return sequence_json(event, final_text(event.request, self._tokenizer), self._engine_url)
        return sequence_json(event, self._partial_text(event), self._engine_url)

    def _partial_text(self, event: Event) -> str:
        if self._tokenizer is None:
            return ""
        request = event.request
        if request.index not in self._texts:
            self._texts[request.index] = IncrementalText(self._tokenizer, request.params.skip_special_tokens)
        text = self._texts[request.index].update(request.output_ids[: event.num_tokens])
        return hold_back_partial_stop(text, request.params.stop) if request.params.stop else text


class Frontend:
    """The registry of all requests between arrival and answer."""

    def __init__(self, *, max_requests: int, random_seed: int | None, engine_url: str | None = None) -> None:
        self._engine_url = engine_url
        self._max_requests = max_requests
        self._loop = asyncio.get_running_loop()
        self._active: dict[str, Request] = {}
        self._parents: dict[str, int] = {}
        first_seed = random.getrandbits(62) if random_seed is None else random_seed * SEEDS_APART
        self._seeds = itertools.count(first_seed)
        self._failed: Unavailable | None = None

    @property
    def num_active(self) -> int:
        return len(self._active)

    def next_seed(self) -> int:
        return next(self._seeds)

    def submit(self, engine: EngineThread, body: GenerateBody, tokenizer: Tokenizer | None) -> Answer:
        """Hand the requests of `body` to the engine. Raises RequestError for a duplicate id, Unavailable when full."""
        if self._failed is not None:
            raise self._failed
        requests = body.requests
        if len(self._active) + len(requests) > self._max_requests:
            raise Unavailable(f"The request queue is full ({self._max_requests} requests).")
        for rid in body.rids:
            if rid in self._parents:
                raise RequestError(f"Duplicate request ID detected: {rid}")
        for request in requests:
            if request.rid in self._active:
                raise RequestError(f"Duplicate request ID detected: {request.rid}")
        answer = Answer(body, tokenizer, self._engine_url)
        for request in requests:
            request.owner = answer
            self._active[request.rid] = request
        self._parents.update(dict.fromkeys(body.rids, 1))
        engine.post(partial(_add, requests))
        return answer

    def forget(self, engine: EngineThread, answer: Answer) -> None:
        """The caller no longer waits; what is unfinished is aborted, so that its place is free."""
        for rid in answer.body.rids:
            self._parents.pop(rid, None)
        if answer.done or not engine.alive:
            return
        engine.post(lambda scheduler: _abort(scheduler, lambda request: request.owner is answer))

    def abort(self, engine: EngineThread, rid: str) -> None:
        """Abort the request `rid` and, as SGLang does, all whose id begins with it; unknown ids do nothing."""
        if rid and (rid in self._active or rid in self._parents):
            engine.post(lambda scheduler: _abort(scheduler, lambda request: request.rid.startswith(rid)))

    def abort_all(self, engine: EngineThread) -> None:
        engine.post(lambda scheduler: _abort(scheduler, lambda _: True))

    def deliver_from_thread(self, events: list[Event]) -> None:
        """Called on the engine thread."""
        self._loop.call_soon_threadsafe(self._deliver, events)

    def fail_all(self, error: Unavailable) -> None:
        """The engine died: everybody who waits is told, and everybody who comes."""
        self._failed = error
        for request in self._active.values():
            request.owner.fail(error)
        self._active.clear()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if event.finished:
                self._active.pop(event.request.rid, None)
            event.request.owner.take(event)


def _add(requests: list[Request], scheduler: Scheduler) -> None:
    scheduler.add(requests)


def _abort(scheduler: Scheduler, selects: Any) -> None:
    scheduler.abort(selects)
