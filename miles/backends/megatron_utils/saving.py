"""A checkpoint set on its way to the disk, while the caller waits or beside the training.

rank 0:   directory ------------------> own part --> waits for the others' parts --> publishes by one rename
others:   are told the directory -----> own part
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from miles.backends.megatron_utils import parallel
from miles.backends.megatron_utils.hf_export import publish
from miles.utils import checkpoint_set

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Saving:
    """See the module docstring. Making it is a collective: afterwards all ranks know the directory."""

    def __init__(self, path: Path, rollout_state: str | Path | None) -> None:
        """Raises OSError on every rank where rank 0 cannot make the directory."""
        self.path = path
        """Where the set is once it is published."""
        self._publication = ExitStack()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._part = self._open(rollout_state)

    def start(self, write: Callable[[Path], None], complete: Callable[[Path], None], *, in_background: bool) -> None:
        """Write this rank's part, and on rank 0 publish the set when `complete` has put all parts together.

        Waits for both on all ranks, unless `in_background`.
        """
        if in_background:
            self._thread = threading.Thread(target=self._run_to_end, args=(write, complete), name="checkpoint")
            self._thread.start()
            return
        try:
            self._run(write, complete)
        finally:
            parallel.barrier()

    def finish(self) -> None:
        """Wait until this rank's part is done, on rank 0 until the set is published. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def _open(self, rollout_state: str | Path | None) -> Path:
        part: Path | None = None
        failure: OSError | None = None
        if dist.get_rank() == 0:
            try:
                checkpoint_set.remove_abandoned_parts(self.path.parent)
                part = self._publication.enter_context(publish(self.path))
                if rollout_state is not None:
                    checkpoint_set.take_rollout_part(rollout_state, part)
            except OSError as error:
                failure = error
        told = [str(part) if failure is None else None, str(failure)]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(told, src=0)
        if failure is not None:
            self._publication.close()
            raise failure
        if told[0] is None:
            raise OSError(f"trainer rank 0 cannot write {self.path}: {told[1]}")
        return Path(told[0])

    def _run(self, write: Callable[[Path], None], complete: Callable[[Path], None]) -> None:
        with self._publication:
            write(self._part)
            if dist.get_rank() == 0:
                complete(self._part)
        if dist.get_rank() == 0:
            checkpoint_set.write_pointer(self.path.parent, checkpoint_set.rollout_id_of(self.path))

    def _run_to_end(self, write: Callable[[Path], None], complete: Callable[[Path], None]) -> None:
        try:
            self._run(write, complete)
            logger.info("checkpoint %s: this rank's part is written", self.path)
        except BaseException as error:  # raised by `finish`, on the thread that waits for the set
            logger.exception("checkpoint %s could not be written", self.path)
            self._failure = error
