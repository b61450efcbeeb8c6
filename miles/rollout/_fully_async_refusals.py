"""What becomes of a group that is not trained on.

aborted, stale, unused ---> retry ---> back to the data source, RECYCLED
                      |        +-----> DROPPED, after --async-max-group-retries
                      +---> drop ----> DROPPED        (--async-unused-samples-handler)
filtered ---------------------------> DROPPED
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from miles.rollout._fully_async_errors import describe_counts, nothing_gets_through
from miles.rollout._fully_async_ledger import DropReason, RecycleReason
from miles.rollout._fully_async_prompts import retries_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles.rollout._fully_async_config import FullyAsyncConfig
    from miles.rollout._fully_async_groups import PromptGroup
    from miles.rollout._fully_async_ledger import GroupKey, GroupLedger
    from miles.rollout._fully_async_prompts import PromptSupply

logger = logging.getLogger("miles.rollout.fully_async_rollout")


class Refusals:
    """Sends groups where they belong and counts them. `on_change` is called after each.

    Only what this process has generated counts for `--max-empty-batches`: a restored queue could use it up at once, and
    so would each process that starts from there.
    """

    def __init__(
        self, config: FullyAsyncConfig, ledger: GroupLedger, prompts: PromptSupply, on_change: Callable[[], None]
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._prompts = prompts
        self._on_change = on_change
        self._in_a_row: Counter[str] = Counter()  # by reason, since a group was kept last
        self._began: float | None = None  # when the first of them was turned down (loop time)
        self._warned = 0.0

    def unused(self, key: GroupKey, reason: RecycleReason) -> bool:
        """The group cannot be used as it is. Whether it was recycled, else it was dropped. Raises what the data source
        raises that does not take it back."""
        if self._config.async_unused_samples_handler == "drop":
            self._drop(key, DropReason(reason.value), reason.value)
            return False
        if retries_of(key.prompt_group) >= self._config.async_max_group_retries:
            self._drop(key, DropReason.MAX_RETRIES, reason.value)
            return False
        key.aborted = True  # its answers are forgotten, whether or not the data source takes it
        self._prompts.take_back(key.prompt_group)
        self._ledger.recycle(key, reason)
        self._count(key, reason.value)
        return True

    def filtered(self, key: GroupKey, reason: str | None) -> None:
        """The dynamic filter does not want the group; the worker has long replaced it."""
        self._drop(key, DropReason.FILTERED, reason or "filtered")

    def unused_by_store(self, prompt_group: PromptGroup) -> None:
        """For custom stores."""
        key = self._ledger.find(prompt_group)
        if key is not None:
            self.unused(key, RecycleReason.UNUSED)

    def dropped_by_store(self, prompt_group: PromptGroup) -> None:
        """For custom stores."""
        key = self._ledger.find(prompt_group)
        if key is not None:
            self.filtered(key, None)

    def one_was_kept(self) -> None:
        if self._in_a_row:
            self._in_a_row.clear()
            self._began = None

    def require_budget(self) -> None:
        """Raise NothingGetsThrough where `--max-empty-batches` is used up."""
        batches = self._config.max_empty_batches
        if batches is not None and self._in_a_row.total() >= batches * self._config.rollout_batch_size:
            raise nothing_gets_through(batches, self._in_a_row)

    def warn_where_nothing_is_kept(self, now: float, every: float) -> None:
        """Groups finish and none is kept: say so, with the reasons, every `every` seconds."""
        if self._began is None:
            self._began = self._warned = now
        if now - self._warned < every:
            return
        self._warned = now
        logger.warning(
            "no usable group for %.0f s: all %d finished ones were turned down (%s)",
            now - self._began,
            self._in_a_row.total(),
            describe_counts(self._in_a_row),
        )

    def _drop(self, key: GroupKey, reason: DropReason, word: str) -> None:
        self._ledger.drop(key, reason)
        self._count(key, word)

    def _count(self, key: GroupKey, word: str) -> None:
        if key.finished_at is not None:
            self._in_a_row[word] += 1
        self._on_change()
