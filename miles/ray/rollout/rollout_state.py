"""The rollout side's part of a checkpoint set: groups that are pulled and not trained, and where the prompts go on.

    save   rollout loop: one moment of rollout function and data source --caller's thread--> JSON, staged beside the set
    load   JSON --rollout loop--> rollout function (which restores its data source), or else the data source alone

    what the rollout function has            what is saved
    take_moment / restore (fully async)      finished groups with their samples, unfinished ones as prompts, counters,
                                             and the data source's state, all of one moment
    snapshot / restore (plug-ins)            what `snapshot` returns, JSON-ready
    neither                                  the data source as it was before the batch that is being generated, so
                                             that a batch which nobody has trained on is generated again
    a data source with a `save` of its own   is called with the rollout id as well, and with `load` on resume

Everything that touches rollout function and data source runs on the shared rollout loop, between two of their steps.
The methods block and are called from other threads.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from miles.rollout.data_source import RolloutDataSource
from miles.rollout.inference_rollout.compatibility import describe
from miles.utils import checkpoint_set
from miles.utils.async_utils import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TextIO

logger = logging.getLogger(__name__)

FORMAT = 1
_PIECE_DEPTH = 5  # a sample
_PAUSE_SECS = 0.0001


class RolloutState:
    """What a rollout function and its data source keep between training steps."""

    def __init__(self, rollout_fn: Any, data_source: Any, *, saves: bool) -> None:
        """`saves`: whether checkpoints are written, so that the state before each batch is worth remembering."""
        self._fn = rollout_fn
        self._data_source = data_source
        self._has_state = hasattr(data_source, "state_dict") and hasattr(data_source, "load_state_dict")
        self._has_own_files = not self._has_state or _saves_by_itself(data_source)
        self._remembers = saves and self._has_state and not hasattr(rollout_fn, "snapshot")
        self._before_batch: dict[int, dict[str, Any]] = {}

    # -- what the rollout function hears of training

    def before_generate(self, rollout_id: int) -> None:
        """To be called before the rollout function is asked for this batch."""
        if self._remembers:
            state = _on_loop(self._data_source.state_dict)
            self._before_batch = {i: s for i, s in self._before_batch.items() if i >= rollout_id - 1}
            self._before_batch[rollout_id] = state

    def acknowledge(self, rollout_id: int) -> None:
        """The trainer has finished its step on this batch."""
        self._tell("acknowledge", rollout_id)

    def give_back(self, rollout_id: int) -> None:
        """The trainer's step on this batch has failed or was cancelled."""
        self._tell("give_back", rollout_id)

    def on_weight_version(self, version: int) -> None:
        """The engines have these weights now."""
        self._tell("on_weight_version", version)

    def announce_weight_version(self, version: int) -> bool:
        """The engines get these weights next. False where the rollout function would not have it."""
        announce = getattr(self._fn, "announce_weight_version", None)
        return announce is None or bool(_on_loop(announce, version))

    def _tell(self, method: str, value: int) -> None:
        if hasattr(self._fn, method):
            _on_loop(getattr(self._fn, method), value)

    # -- checkpoints

    def save(self, directory: str, rollout_id: int) -> str:
        """Stage the part of the set after `rollout_id` under `directory`; returns its path."""
        if self._has_own_files:
            self._data_source.save(rollout_id)
        state = {
            "format": FORMAT,
            "rollout_id": rollout_id,
            "rollout_function": describe(self._fn),
            **self._take(rollout_id),
        }
        path = checkpoint_set.staged_rollout_path(directory, rollout_id)
        with path.open("w", encoding="utf-8") as file:
            _write_json(file, state)
        return str(path)

    def _take(self, rollout_id: int) -> dict[str, Any]:
        if hasattr(self._fn, "take_moment"):  # encoded here, off the loop
            return {"snapshot": _on_loop(self._fn.take_moment)}
        if hasattr(self._fn, "snapshot"):
            return {"snapshot": _on_loop(self._fn.snapshot)}
        if not self._has_state:
            return {}
        before_next = self._before_batch.get(rollout_id + 1)
        return {"data_source": _on_loop(self._data_source.state_dict) if before_next is None else before_next}

    def load(self, checkpoint: Path) -> None:
        """Go on from this set. Raises ValueError, naming the file, where the state in it cannot be used."""
        rollout_id = checkpoint_set.rollout_id_of(checkpoint)
        path = checkpoint_set.rollout_part(checkpoint)
        if path is None:
            logger.warning(
                "checkpoint %s has no rollout part (an older version saved it): the data source goes on from its own "
                "file, and groups that were pulled and not trained when it was saved are skipped",
                checkpoint,
            )
            self.load_data_source(rollout_id)
            return
        if self._has_own_files:
            self.load_data_source(rollout_id)
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if state["format"] != FORMAT or state["rollout_id"] != rollout_id:
                raise ValueError(f"format {state['format']!r} of rollout {state['rollout_id']!r}")
            self._restore(state)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
        logger.info("resumed from %s", path)

    def _restore(self, state: dict[str, Any]) -> None:
        snapshot = state.get("snapshot")
        if snapshot is not None and hasattr(self._fn, "restore"):
            _on_loop(self._fn.restore, snapshot)
            return
        data_source = state.get("data_source")
        if snapshot is not None:
            logger.warning(
                "%s has saved groups that were pulled and not trained, and %s cannot restore them: they are skipped",
                state.get("rollout_function"),
                describe(self._fn),
            )
            data_source = snapshot.get("data_source")
        if data_source is not None and self._has_state:
            _on_loop(self._data_source.load_state_dict, data_source)

    def load_data_source(self, rollout_id: int) -> None:
        """Let the data source read the file of its own that it wrote after `rollout_id`."""
        self._data_source.load(rollout_id)


def _saves_by_itself(data_source: Any) -> bool:
    """Whether a plug-in has replaced the built-in way of saving: it may keep more than its `state_dict` tells."""
    save = getattr(type(data_source), "save", None)
    return save is not None and save is not RolloutDataSource.save


def _on_loop(function: Callable[..., Any], *args: Any) -> Any:
    """Call a plain function on the rollout loop and wait for what it returns."""

    async def call() -> Any:
        return function(*args)

    return run(call())


def _let_the_loop_go_first() -> None:
    """Between two groups: a thread that never waits would hold the interpreter for milliseconds whenever the rollout
    loop has something to do."""
    time.sleep(_PAUSE_SECS)


def _write_json(file: TextIO, value: Any, depth: int = 0) -> None:
    """`json.dump` in pieces: encoding one piece holds the interpreter, and the rollout loop must not stand still while
    gigabytes of samples are written."""
    if hasattr(value, "parts"):  # a moment, which is encoded as it is written
        opening = "{"
        for name, part in value.parts(_let_the_loop_go_first):
            file.write(f"{opening}{json.dumps(name)}: ")
            _write_json(file, part, depth + 1)
            opening = ", "
        file.write("}")
    elif isinstance(value, Iterator):
        opening = ""
        file.write("[")
        for item in value:
            file.write(opening)
            _write_json(file, item, depth + 1)
            opening = ", "
        file.write("]")
    elif depth < _PIECE_DEPTH and isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        opening = "{"
        for key, item in value.items():
            file.write(f"{opening}{json.dumps(key)}: ")
            _write_json(file, item, depth + 1)
            opening = ", "
        file.write("}")
    elif depth < _PIECE_DEPTH and isinstance(value, list) and value:
        opening = "["
        for item in value:
            file.write(opening)
            _write_json(file, item, depth + 1)
            opening = ", "
        file.write("]")
    else:
        file.write(json.dumps(value))
