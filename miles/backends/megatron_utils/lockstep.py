"""A weight update is gathered by all trainer ranks together, and sent by rank 0 alone, where it may fail.

    all ranks:  gather, gather, gather, ...  (collectives: each rank must take part in each)
    rank 0:       send,   send, refused! -> goes on gathering without sending -> tells the others -> raises
    others:                                                                      hear of it      -> raise the same

So no rank is left waiting in a gather, and all ranks agree on whether the engines have the new version.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
R = TypeVar("R")


def in_lockstep(gathered: Iterator[T], consume: Callable[[Iterator[T]], R] | None) -> R | None:
    """Iterate `gathered` to its end on every rank; rank 0, and only it, gives a `consume` that takes its items.

    Returns what `consume` returned, on rank 0. What it raises is raised on every rank. An error of the gather itself is
    raised at once: the ranks are out of step then, and only their timeouts tell the others.
    """
    steps = _Steps(gathered)
    result: R | None = None
    failure: Exception | None = None
    if consume is not None:
        try:
            result = consume(steps)
        except Exception as error:  # handed to every rank below; one of the gather is not, see above
            if steps.failed:
                raise
            failure = error
    for _ in steps:
        pass
    told = _from_rank_0(failure)
    if failure is not None:
        raise failure
    if told is not None:
        raise told
    return result


class _Steps:
    """Iterates, and remembers whether it was the iterator that failed."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self.failed = False

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            raise
        except BaseException:
            self.failed = True
            raise


def _from_rank_0(failure: Exception | None) -> Exception | None:
    """A collective: the failure that rank 0 hands in, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return failure
    told = [_as_sent(failure)]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _as_sent(failure: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(failure))
    except Exception:  # an exception class may define anything; its words are what matters
        return RuntimeError(f"{type(failure).__name__} on trainer rank 0: {failure}")
    return failure
