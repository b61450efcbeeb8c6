"""Which prompt groups may start, so that none is born too old to be trained on.

Why a window bounds staleness. Let B groups make a batch, k batches an update, and K be the limit. Of the groups that
leave generation from one update to the next, in order, the first k*B are trained at the current version V, the next k*B
at V+1, and so on. So a group that starts now, with `held` groups before it (in flight, queued, or taken for the batch
that is being collected) and `handed` ones given to the trainer since V was published, is trained at version
V + (held + handed) // (k*B). That is at most V + K exactly where

    held + handed < (K + 1) * k * B

With K = 0 and k = 1 this is synchronous training: one batch is generated, and nothing starts before the next version.

Why it never blocks a call that waits. While a call collects its batch, `handed` is at most (k-1)*B: a call that comes
after k batches without a new version tells that the update has not come, and the window is counted from there on
(`call_begins`). So as long as fewer than B groups are held, at least one may start. Groups that are recycled or dropped
are no longer held.

A group that is overtaken by others can still grow too old; the drain measures it and recycles it.
"""

from __future__ import annotations


class Admission:
    """The window above; without a limit it is open. Where the trainer's version is not known, nobody asks."""

    def __init__(self, *, limit: int | None, update_interval: int, batch_size: int) -> None:
        self._batches_of_a_version = update_interval * batch_size
        self.window: int | None = None if limit is None else (limit + 1) * self._batches_of_a_version
        """Groups; None where there is no limit."""

        self.handed = 0
        """Groups given to the trainer under the current version."""

    def admits(self, held: int, most: int) -> int:
        """How many more groups may start, `most` at most, while `held` ones have started and have not been handed
        over."""
        return most if self.window is None else max(0, min(most, self.window - self.handed - held))

    def version_changes(self) -> None:
        self.handed = 0

    def takes_back(self, groups: int) -> None:
        """Groups that were handed over under the current version are held again."""
        self.handed = max(0, self.handed - groups)

    def call_begins(self) -> None:
        self.handed %= self._batches_of_a_version
