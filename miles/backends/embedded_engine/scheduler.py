"""Which requests run, and one step of them: the engine's state machine, without threads.

                 add                      admit                      finished | aborted
    client ------------> waiting (FIFO) ---------> running (KV rows) -------------------> events
                              ^                       |
                              +------ retracted ------+   (pause mode retract, or the KV cache is full)

Consumes: requests and commands, between steps. Waits for: nothing; `step` returns when one token for each running
request is there. Produces: `Event`s, which the caller collects with `take_events`.

Invariants: every request is in exactly one of waiting, running, finished; a running request has a KV row and gets one
token from every step; all tokens of one step come from one set of weights, named by `version`.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from miles.backends.embedded_engine.named_weights import named_weights, swap_weights
from miles.backends.embedded_engine.sampler import Sampler
from miles.backends.embedded_engine.step_plan import plan_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from miles.backends.embedded_engine.kv_cache import KVCache
    from miles.backends.embedded_engine.model import EngineModel
    from miles.backends.embedded_engine.request import Request
    from miles.backends.embedded_engine.step_plan import StepPlan

logger = logging.getLogger(__name__)


class PauseMode(Enum):
    """What happens to the requests in flight while generation is paused."""

    ABORT = "abort"
    """They end at once with the tokens they have."""
    RETRACT = "retract"
    """They lose their KV rows; afterwards they go on from the same tokens, with KV recomputed by the new weights."""
    IN_PLACE = "in_place"
    """They keep their KV rows, and go on with keys and values of the old weights."""


@dataclass(frozen=True)
class Event:
    """News of one request: finished, or (streaming) one token longer."""

    request: Request
    num_tokens: int
    """Length of the output at this moment; a later step may have added to it since."""
    version: str
    """The engine's weight version at this moment."""
    finished: bool


class Scheduler:
    """Owned by one thread."""

    def __init__(
        self,
        model: EngineModel,
        cache: KVCache,
        *,
        max_running_requests: int,
        max_prefill_tokens: int,
        version: str,
    ) -> None:
        self.model = model
        self.cache = cache
        self.version = version
        self.paused: PauseMode | None = None
        self.steps = 0
        self.tokens_generated = 0
        self._max_running_requests = max_running_requests
        self._max_prefill_tokens = max_prefill_tokens
        self._waiting: deque[Request] = deque()
        self._sampler: Sampler | None = None
        self._sampled_requests: list[Request] = []
        self._events: list[Event] = []

    # What the state is.

    @property
    def num_running(self) -> int:
        return self.cache.running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def can_step(self) -> bool:
        return self.paused is None and (bool(self._waiting) or self.num_running > 0)

    def running(self) -> list[Request]:
        self.cache.compact()
        return [request for pool in self.cache.classes for request in pool.requests]

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Commands, between steps.

    def add(self, requests: Iterable[Request]) -> None:
        self._waiting.extend(requests)

    def abort(self, selects: Callable[[Request], bool]) -> int:
        """End the requests that `selects` picks, with the tokens they have; returns how many."""
        running = [request for request in self.running() if selects(request)]
        waiting = [request for request in self._waiting if selects(request)]
        if waiting:
            gone = set(map(id, waiting))
            self._waiting = deque(request for request in self._waiting if id(request) not in gone)
        for request in running + waiting:
            request.abort()
            self._finish(request)
        return len(running) + len(waiting)

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping; new requests wait until `resume`. Pausing again changes the mode."""
        if mode is PauseMode.ABORT:
            self.abort(lambda _: True)
        elif mode is PauseMode.RETRACT:
            self._retract(self.running())
            self.cache.trim()
        self.paused = mode

    def resume(self) -> None:
        self.paused = None

    def flush_cache(self) -> bool:
        """Free unused KV memory; False (and nothing is done) while requests run, or wait although nothing is paused."""
        if self.num_running or (self._waiting and self.paused is None):
            return False
        self.cache.trim()
        return True

    def publish(self, weights: Mapping[str, torch.Tensor], version: str | None) -> None:
        """Make `weights` (by name) and `version` the model's, in one step: a swap; only fused experts are copied."""
        swap_weights(self.model.module, weights)
        if version is not None:
            self.version = version

    def weights(self) -> dict[str, torch.Tensor]:
        """The current weights by name; published tensors are never written again, so this is a snapshot."""
        return {name: weight.data for name, weight in named_weights(self.model.module).items()}

    def info(self) -> dict[str, Any]:
        return {
            "num_running_reqs": self.num_running,
            "num_waiting_reqs": self.num_waiting,
            "paused": None if self.paused is None else self.paused.value,
            "weight_version": self.version,
            "kv_cache_tokens": self.cache.allocated_tokens,
            "max_total_num_tokens": self.cache.max_total_tokens,
            "steps": self.steps,
            "tokens_generated": self.tokens_generated,
        }

    # One step.

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, compute one token for each running request, and finish those that are done."""
        self._make_room_to_grow()
        joining = self._admit()
        self.cache.compact()
        shape = self.model.info.kv_shape
        plan = plan_step(self.cache, joining, kv_heads=shape.kv_heads, dtype=shape.dtype)
        logits = self.model.logits(plan)
        self._score_prompts(plan, logits)
        if plan.requests != self._sampled_requests:
            self._sampler, self._sampled_requests = Sampler(plan.requests, shape.device), plan.requests
        assert self._sampler is not None
        tokens, logprobs = self._sampler.sample(logits[: len(plan.requests)])
        version = self.version
        self.steps += 1
        self.tokens_generated += len(tokens)
        for request, token, logprob in zip(plan.requests, tokens, logprobs, strict=True):
            if request.max_new_tokens == 0:
                request.finish_empty()
                self._finish(request)
            elif request.append(token, logprob, version):
                self._finish(request)
            elif request.stream:
                self._events.append(Event(request, len(request.output_ids), version, finished=False))

    def _admit(self) -> list[Request]:
        """Move requests from the line to free KV rows, in order; at least one if nothing else runs."""
        joining: list[Request] = []
        free = self._max_running_requests - self.num_running
        budget = self._max_prefill_tokens
        while self._waiting and len(joining) < free:
            request = self._waiting[0]
            budget -= request.num_tokens
            if (joining and budget < 0) or not self.cache.join(request):
                break
            joining.append(self._waiting.popleft())
        return joining

    def _make_room_to_grow(self) -> None:
        """Give requests that have outgrown their row a longer one; where there is none, the newest ones go back."""
        for request in self.cache.outgrown():
            while request.pool is not None and not self.cache.promote(request):
                newest = max(self.running(), key=lambda r: r.arrived)
                logger.warning(
                    "The KV cache (%d tokens) is full: request %s goes back to the queue; raise --max-total-tokens",
                    self.cache.max_total_tokens,
                    newest.rid,
                )
                self._retract([newest])

    def _retract(self, requests: list[Request]) -> None:
        for request in sorted(requests, key=lambda r: r.arrived, reverse=True):
            self.cache.leave(request)
            request.num_retractions += 1
            self._waiting.appendleft(request)

    def _finish(self, request: Request) -> None:
        if request.pool is not None:
            self.cache.leave(request)
        request.token_counts = None
        self._events.append(Event(request, len(request.output_ids), self.version, finished=True))

    def _score_prompts(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Log-probs of prompt tokens, of the temperature-scaled distribution, for the requests that asked."""
        for request, start, size in plan.scored:
            assert request.input_logprobs_from is not None
            first = max(request.input_logprobs_from, 1)
            rows = logits[start + first - 1 : start + size].float() / request.params.scale
            wanted = torch.tensor(request.prompt_ids[first:], device=logits.device)[:, None]
            scores = torch.log_softmax(rows, dim=-1).gather(1, wanted)[:, 0].tolist()
            request.input_logprobs = ([None] if request.input_logprobs_from == 0 else []) + scores
