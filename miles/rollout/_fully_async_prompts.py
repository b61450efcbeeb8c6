"""Where the worker's prompt groups come from, and how they go back.

    _reissue (a restored state's) --first--> next_group --> the worker
    data source ---------------------------^     ^
       ^                                         |
       +------------ take_back (answers forgotten, retries counted)

A data source hands out what it was given back before anything fresh, so a few groups that fail again and again could
keep fresh ones waiting. Two things bound that: a group may start over `--async-max-group-retries` times, and where the
data source has `get_fresh_samples(n)`, a fresh group comes after each retried one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from miles.rollout.sample_codec import unsaveable_names
from miles.utils.types import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles.rollout._fully_async_groups import PromptGroup

_NUM_FIELDS = len(fields(Sample))
_FIRST_LOOKS, _LOOK_EVERY = 256, 16
_RETRIES = "fully_async_retries"  # an attribute of the group's first sample, so that it is saved with it


class PromptSupply:
    def __init__(self, data_source: Any) -> None:
        self._data_source = data_source
        self._get_fresh = _get_fresh_samples(data_source)
        self._reissue: deque[PromptGroup] = deque()
        self._fresh_is_next = False
        self.ended = False
        """The data source had nothing, when it was asked last."""

        self.unsaveable: set[str] = set()
        """Entries of the metadata, and other attributes, that fresh prompts came with and no checkpoint can hold."""

        self._fresh = 0
        self._seen: set[str] = set()  # of all such names, saveable or not

    @property
    def end_message(self) -> str:
        return f"{type(self._data_source).__name__}.get_samples(1) returned 0 groups"

    def next_group(self) -> PromptGroup | None:
        """One prompt group, None where the data has ended. Raises RuntimeError for a data source that returns more."""
        if self._reissue:
            return self._reissue.popleft()
        groups = self._get_fresh(1) if self._fresh_is_next and self._get_fresh is not None else None
        if not groups:
            groups = self._data_source.get_samples(1)
        if not isinstance(groups, list):
            raise TypeError(f"{type(self._data_source).__name__}.get_samples(1) returned {groups!r}, expected a list")
        if len(groups) == 1:
            group: PromptGroup = groups[0]
            self.ended = False
            self._fresh_is_next = retries_of(group) > 0
            if group and not self._fresh_is_next:
                self._look_at(group[0])
            return group
        if groups:
            raise RuntimeError(
                f"{type(self._data_source).__name__}.get_samples(1) returned {len(groups)} groups; fully-async rollout "
                "takes one at a time, for as long as the run lasts (a data source starts its next epoch by itself)"
            )
        self.ended = True
        return None

    def take_back(self, prompt_group: PromptGroup) -> None:
        """Give the flat prompt group back to the data source, its answers forgotten. Raises what that raises."""
        for sample in prompt_group:
            sample.reset_for_retry()
        if prompt_group:
            setattr(prompt_group[0], _RETRIES, retries_of(prompt_group) + 1)
        self._data_source.add_samples([prompt_group])
        self.ended = False

    def _look_at(self, fresh: Sample) -> None:
        """What is on a sample before any user code of the rollout has seen it belongs to its prompt.

        Entries of the metadata are looked at on each; attributes, which a data source puts on all of its prompts or on
        none, on the first ones and then on one in `_LOOK_EVERY`: looking gives a sample a dictionary, which slows down
        whoever reads it afterwards.
        """
        if not isinstance(fresh, Sample):
            return
        self._fresh += 1
        at_attributes = self._fresh <= _FIRST_LOOKS or self._fresh % _LOOK_EVERY == 0
        if not self._seen.issuperset(fresh.metadata) or (at_attributes and len(vars(fresh)) > _NUM_FIELDS):
            names = {*fresh.metadata, *vars(fresh)}
            if not self._seen.issuperset(names):
                self.unsaveable |= unsaveable_names(fresh)
                self._seen |= names

    def reissue(self, prompt_groups: list[PromptGroup]) -> None:
        """Hand these out before anything else."""
        self._reissue.extend(prompt_groups)

    @property
    def waiting(self) -> list[PromptGroup]:
        """Groups that `reissue` got and that were not handed out yet."""
        return list(self._reissue)

    def state_dict(self) -> Any:
        """The data source's, None where it has none."""
        read = getattr(self._data_source, "state_dict", None)
        return None if read is None else read()

    def load_state_dict(self, state: Any) -> None:
        if state is not None:
            self._data_source.load_state_dict(state)


def _get_fresh_samples(data_source: Any) -> Callable[[int], list[PromptGroup]] | None:
    """The data source's `get_fresh_samples`. None where a subclass has replaced `get_samples` alone: what it changes -
    where the data ends, what is handed out - would not hold for the inherited one."""
    for cls in type(data_source).__mro__:
        if "get_fresh_samples" in vars(cls):
            break
        if "get_samples" in vars(cls):
            return None
    return getattr(data_source, "get_fresh_samples", None)


def retries_of(prompt_group: PromptGroup) -> int:
    """How often the group has started over."""
    return getattr(prompt_group[0], _RETRIES, 0) if prompt_group else 0
