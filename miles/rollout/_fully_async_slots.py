"""The places in generation, counted in samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles.rollout._fully_async_ledger import GroupKey
    from miles.rollout._fully_async_window import ActiveTime


class SampleSlots:
    """`total` places. A group takes `per_group` of them and frees each once: one by one, or the rest together.

    `on_room` is called when a sample has freed its place and one more group fits. `generation` learns when a group is
    being generated: until its last sample has freed its place, or, where none does so by itself, until the group is
    finished.
    """

    def __init__(
        self,
        total: int,
        per_group: int,
        on_room: Callable[[], None],
        generation: ActiveTime,
        clock: Callable[[], float],
    ) -> None:
        self.total = total
        self.per_group = per_group
        self._on_room = on_room
        self._generation = generation
        self._clock = clock
        self._generating = 0  # groups
        self._spare = total - per_group  # free places beside those of one more group; below 0 none fits

    @property
    def used(self) -> int:
        return self.total - self.per_group - self._spare

    @property
    def groups_that_fit(self) -> int:
        return self._spare // self.per_group + 1

    def take(self, key: GroupKey) -> None:
        self._spare -= self.per_group
        key.slots = self.per_group
        key.places = self
        if not self._generating:
            self._generation.begin(key.pulled_at)
        self._generating += 1

    def finish(self, key: GroupKey, finished_at: float) -> None:
        """Nothing of the group is being generated any more, whatever places it still holds."""
        if key.slots:
            self._generating -= 1
            if not self._generating:
                self._generation.end(finished_at)

    def free_all(self, key: GroupKey) -> None:
        """The group has left generation."""
        self._spare += key.slots
        key.slots = 0


def free_one(key: GroupKey) -> None:
    """A sample of the group has finished: it frees its place. Does nothing where all of them are free already.

    A function of the key alone, so that generation can be given it as a bound method, which is the quickest callback.
    """
    if key.slots:
        places = key.places
        key.slots = left = key.slots - 1
        places._spare = spare = places._spare + 1
        if not left and key.finished_at is None:
            places._generating -= 1
            if not places._generating:
                places._generation.end(places._clock())
        if not spare:  # with more room than that, it has been called before
            places._on_room()
