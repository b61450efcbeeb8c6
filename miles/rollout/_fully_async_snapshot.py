"""The state of a fully-async rollout at one moment, as JSON-ready data, and back.

    books, prompts, versions --take_moment, on the loop--> Moment --encode, anywhere--> data --restore_state--> the same

finished   groups that are queued or drained: prompt group and answers, in the order of their pulls
prompts    without answers: groups that are in flight, those with an aborted or failed sample, which would start over
           anyway, and those of an earlier state that wait to be issued again
ledger     counts, in which all that is saved as a prompt is in flight
versions   the trainer's weight versions
data_source   its own `state_dict()`, None where it has none (the owner of the checkpoint calls its `save`)

A moment is taken between two steps of the loop and costs a shallow copy of each sample; encoding thousands of answers
takes seconds and is done beside the loop. What happens meanwhile does not reach the moment: a finished answer is never
changed in place (a group that starts over, or is filtered, gets new values in its fields), and of a group in
generation only the question is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles.rollout._fully_async_groups import take_stock
from miles.rollout._fully_async_ledger import Owner
from miles.rollout._fully_async_window import LedgerWindow
from miles.rollout.sample_codec import SampleCodecError, decode_sample, encode_fields, encode_prompt, hold

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from miles.rollout._fully_async_finished import FinishedGroups
    from miles.rollout._fully_async_groups import Group, PromptGroup
    from miles.rollout._fully_async_ledger import GroupKey, GroupLedger
    from miles.rollout._fully_async_prompts import PromptSupply
    from miles.rollout._fully_async_trainer import TrainerSide
    from miles.rollout._fully_async_versions import WeightVersions
    from miles.rollout.sample_codec import Fields

logger = logging.getLogger("miles.rollout.fully_async_rollout")

FORMAT = 1

Held = list[Any]
"""The fields of each sample of a group, nested as the group is."""


@dataclass
class _Notes:
    """What a moment could not encode."""

    without_answers: list[tuple[str, list[Fields], Held]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def warn(self) -> None:
        if self.reasons:
            logger.warning(
                "%d finished groups are saved as prompts, to be generated again by a run that resumes from here; the "
                "first because %s",
                len(self.reasons),
                self.reasons[0],
            )
        if self.left_out:
            logger.warning(
                "%d values that were put on samples are not saved with their prompts; the first because %s",
                len(self.left_out),
                self.left_out[0],
            )


@dataclass(frozen=True)
class Moment:
    """Everything that a rollout consisted of when it was taken."""

    finished: list[tuple[str, list[Fields], Held]]
    """Owner, prompt group and group."""

    prompts: list[list[Fields]]
    ledger: dict[str, Any]
    versions: Any
    data_source: Any
    unsaveable: frozenset[str]
    """What the prompts themselves have and no checkpoint can hold (`PromptSupply.unsaveable`)."""

    def encode(self) -> dict[str, Any]:
        """The moment as JSON-ready data; see `parts`."""
        return {name: list(part) if isinstance(part, Iterator) else part for name, part in self.parts()}

    def parts(self, pause: Callable[[], None] = lambda: None) -> Iterator[tuple[str, Any]]:
        """The JSON-ready data by name, each to be used before the next one is taken; long ones are iterators, so that
        nobody ever holds the whole. `pause` is called after each group.

        A group with an answer that cannot be saved is saved as its prompt, to be generated again; one warning tells how
        many and why. Raises SampleCodecError naming the field where a prompt itself cannot be saved.
        """
        notes = _Notes()
        yield "format", FORMAT
        yield "finished", self._encode_finished(notes, pause)
        yield "prompts", self._encode_unfinished(notes, pause)
        ledger = dict(self.ledger)
        for owner, _, _ in notes.without_answers:
            ledger[owner] -= 1
            ledger[Owner.IN_FLIGHT.value] += 1
        yield "ledger", ledger
        yield "versions", self.versions
        yield "data_source", self.data_source
        notes.warn()

    def _encode_finished(self, notes: _Notes, pause: Callable[[], None]) -> Iterator[dict[str, Any]]:
        for finished in self.finished:
            _, prompt_group, answers = finished
            try:
                yield {"prompt": self._encode_prompts(prompt_group), "group": _encode_held(answers)}
            except SampleCodecError as error:
                notes.without_answers.append(finished)
                notes.reasons.append(str(error))
            pause()

    def _encode_unfinished(self, notes: _Notes, pause: Callable[[], None]) -> Iterator[list[Fields]]:
        for group in [prompt_group for _, prompt_group, _ in notes.without_answers] + self.prompts:
            yield self._encode_prompts(group, notes.left_out.append)
            pause()

    def _encode_prompts(self, group: list[Fields], left_out: Callable[[str], None] | None = None) -> list[Fields]:
        return [encode_prompt(held, self.unsaveable, left_out) for held in group]


def take_moment(ledger: GroupLedger, versions: WeightVersions, prompts: PromptSupply) -> Moment:
    """No await inside."""
    finished, unfinished, counts = [], [], ledger.state_dict()
    for key in ledger.open.values():
        held = [hold(sample) for sample in key.prompt_group]
        if key.owner is Owner.IN_FLIGHT or key.group is None or key.aborted:
            unfinished.append(held)
            counts[key.owner.value] -= 1
            counts[Owner.IN_FLIGHT.value] += 1
        else:
            known = {id(sample): fields for sample, fields in zip(key.prompt_group, held, strict=True)}
            finished.append((key.owner.value, held, _hold_all(key.group, known)))
    return Moment(
        finished,
        [[hold(sample) for sample in group] for group in prompts.waiting] + unfinished,
        counts,
        versions.state_dict(),
        prompts.state_dict(),
        frozenset(prompts.unsaveable),
    )


class KeepsState:
    """The saving half of `FullyAsyncRolloutFn`, which owns everything that is named here."""

    ledger: GroupLedger
    _finished: FinishedGroups
    _prompts: PromptSupply
    _trainer: TrainerSide
    _window: LedgerWindow
    _worker: asyncio.Future[Any] | None

    def take_moment(self) -> Moment:
        """Every group that is pulled and not trained, counters, versions and the data source's state, as they are now:
        `encode` it wherever time does not matter."""
        return take_moment(self.ledger, self._trainer.versions, self._prompts)

    def snapshot(self) -> dict[str, Any]:
        """The moment as JSON-ready data. Raises SampleCodecError naming a field of a prompt that cannot be saved."""
        return self.take_moment().encode()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `snapshot`; before the first call. Raises ValueError where it cannot be understood."""
        if self._worker is not None:
            raise RuntimeError("restore comes before the first call")
        self._finished.restore(restore_state(state, self.ledger, self._trainer.versions, self._prompts))
        self._window = LedgerWindow(self.ledger, restored=int(state["ledger"]["in_flight"]))


def restore_state(
    state: dict[str, Any], ledger: GroupLedger, versions: WeightVersions, prompts: PromptSupply
) -> list[GroupKey]:
    """Load everything; the finished groups, QUEUED, for the caller to queue. Raises ValueError for another format."""
    if state.get("format") != FORMAT:
        raise ValueError(f"rollout state of format {state.get('format')!r}, expected {FORMAT}")
    finished = [_decode_finished(data) for data in state["finished"]]
    prompts.reissue(_decode_prompt_groups(state["prompts"]))
    prompts.load_state_dict(state["data_source"])
    versions.load_state_dict(state["versions"])
    ledger.load_state_dict(state["ledger"])
    keys = []
    for prompt_group, group in finished:
        key = ledger.enter(prompt_group)
        take_stock(key, group)
        keys.append(key)
    return keys


def _hold_all(group: Iterable[Any], known: dict[int, Fields]) -> Held:
    """`known`: the fields of samples that are held already, by id."""
    return [
        _hold_all(member, known) if isinstance(member, (list, tuple)) else known.get(id(member)) or hold(member)
        for member in group
    ]


def _encode_held(held: Held) -> list[Any]:
    return [_encode_held(member) if isinstance(member, list) else encode_fields(member) for member in held]


def _decode_prompt_groups(data: Iterable[list[Any]]) -> list[PromptGroup]:
    return [[decode_sample(sample) for sample in group] for group in data]


def _decode_finished(data: dict[str, Any]) -> tuple[PromptGroup, Group]:
    return [decode_sample(sample) for sample in data["prompt"]], [_decode_member(member) for member in data["group"]]


def _decode_member(data: Any) -> Any:
    return [_decode_member(part) for part in data] if isinstance(data, list) else decode_sample(data)
