"""Where prompt groups come from and where unused ones go back to.

    data set --deep copies, numbered--> get_samples --> rollout
                                            ^              |
                          buffer (first) ---+<-- add_samples (recycled and unused groups)

A group is `n_samples_per_prompt` samples of one prompt. Epochs follow each other without a gap; with
`--rollout-shuffle` each epoch's order depends on `rollout_seed + epoch` alone, so a resumed run sees the same
sequence as an uninterrupted one. The state is written as JSON: loading it can run no code.

The rollout loop takes and returns groups while a checkpoint may be written from another thread, so both classes guard
their counters and the buffer with a lock.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.rollout.prompt_data import load_prompt_dataset
from miles.rollout.sample_codec import SampleCodecError, decode_sample, encode_prompt, encode_sample, hold
from miles.utils.data import copy_prompt
from miles.utils.misc import load_function
from miles.utils.types import Sample

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from miles.utils.data import Dataset

logger = logging.getLogger(__name__)

_CURSOR_FIELDS = ("sample_offset", "epoch_id", "sample_group_index", "sample_index")


class DataSource(ABC):
    """Hands out prompt groups. A class of one's own (`--data-source-path`) is built as `cls(args)`.

    `close()` is called at the end where there is one, and a `dataset` attribute with a length makes `--num-epoch`
    possible. `add_samples` may raise NotImplementedError where unused groups are not taken back. A source that takes
    groups back may have `get_fresh_samples(num_samples)`, which passes them by: with it, retried groups never keep
    fresh ones waiting. A source that is finite returns fewer groups than it is asked for, and [] at its end.
    """

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next `num_samples` prompt groups."""

    @abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back; they are handed out before fresh ones."""

    @abstractmethod
    def save(self, rollout_id: int) -> None:
        """Write the state after `rollout_id` beside the checkpoint."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Go on from the state that `save` wrote after `rollout_id`."""

    def get_buffer_length(self) -> int | None:
        """Groups waiting to be handed out again; None where nothing is kept."""
        return None


class RolloutDataSource(DataSource):
    """Groups from the prompt file, epoch after epoch; takes none back.

    `epoch_id` and `sample_offset` say where the next prompt is; `sample_group_index` and `sample_index` number groups
    and samples over the whole run. With `--disable-rollout-global-dataset` there is no file and samples are empty.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.epoch_id = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._n_samples_per_prompt: int = args.n_samples_per_prompt
        self._shuffle: bool = getattr(args, "rollout_shuffle", False)
        self.dataset: Dataset | None = _load_dataset(args) if getattr(args, "rollout_global_dataset", True) else None
        self._order_epoch()

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        with self._lock:
            return [self._number(prompt) for prompt in self._next_prompts(num_samples)]

    def get_fresh_samples(self, num_samples: int) -> list[list[Sample]]:
        """As `get_samples`, and never a group that was given back."""
        with self._lock:
            return [self._number(prompt) for prompt in self._next_prompts(num_samples)]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} takes no groups back; "
            "use --data-source-path miles.rollout.data_source.RolloutDataSourceWithBuffer"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON-ready data."""
        with self._lock:
            cursor = {name: getattr(self, name) for name in _CURSOR_FIELDS}
            size = None if self.dataset is None else len(self.dataset)
            return {**cursor, "metadata": copy.deepcopy(self.metadata), "dataset_size": size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`. Raises ValueError where a counter is missing."""
        missing = [name for name in _CURSOR_FIELDS if name not in state]
        if missing:
            raise ValueError(f"data source state without {', '.join(missing)}")
        with self._lock:
            for name in _CURSOR_FIELDS:
                setattr(self, name, int(state[name]))
            self.metadata = dict(state.get("metadata") or {})
            self._check_dataset_size(state.get("dataset_size"))
            self._order_epoch()

    def save(self, rollout_id: int) -> None:
        """Write `{save}/rollout/global_dataset_state_dict_{rollout_id}.json`, whole or not at all; nothing without
        `--save`."""
        if getattr(self.args, "save", None) is None:
            return
        path = state_path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".tmp{os.getpid()}")
        temporary.write_text(json.dumps(self.state_dict()), encoding="utf-8")
        os.replace(temporary, path)

    def load(self, rollout_id: int | None = None) -> None:
        """Read what `save` wrote below `--load`; a `.pt` file of the same name is read too, as plain data.

        Without `--load`, without a rollout id and without a file the source starts from its beginning. Raises
        ValueError where the file cannot be understood.
        """
        if getattr(self.args, "load", None) is None or rollout_id is None or rollout_id < 0:
            return
        path = state_path(self.args.load, rollout_id)
        if path.exists():
            self._load_checked(path, _read_json_state(path))
        elif path.with_suffix(".pt").exists():
            self._load_checked(path.with_suffix(".pt"), _read_pt_state(path.with_suffix(".pt")))
        else:
            logger.warning("there is no data source state %s: the prompts start from the beginning", path)

    def _load_checked(self, path: Path, state: Any) -> None:
        try:
            self.load_state_dict(state)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: not a usable data source state: {error}") from error

    def _order_epoch(self) -> None:
        if self.dataset is not None and self._shuffle:
            self.dataset.shuffle(self.epoch_id)

    def _check_dataset_size(self, saved_size: int | None) -> None:
        if self.dataset is None:
            return
        if saved_size is not None and saved_size != len(self.dataset):
            logger.warning(
                "the data set has %d prompts, it had %d when the state was saved: some are repeated or left out",
                len(self.dataset),
                saved_size,
            )
        self.sample_offset = min(self.sample_offset, len(self.dataset))

    def _next_prompts(self, count: int) -> list[Sample]:
        if self.dataset is None:
            return [Sample() for _ in range(count)]
        prompts: list[Sample] = []
        while len(prompts) < count:
            if self.sample_offset >= len(self.dataset):
                self.epoch_id += 1
                self.sample_offset = 0
                self._order_epoch()
            taken = self.dataset.samples[self.sample_offset : self.sample_offset + count - len(prompts)]
            self.sample_offset += len(taken)
            prompts += taken
        return prompts

    def _number(self, prompt: Sample) -> list[Sample]:
        group = [copy_prompt(prompt) for _ in range(self._n_samples_per_prompt)]
        for sample in group:
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Groups that came back are handed out first, in the order that the buffer filter decides.

    The buffer is saved too, so that a group that came back before a checkpoint is not lost by a resume.
    """

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        path = getattr(args, "buffer_filter_path", None)
        self.buffer_filter: Callable[..., list[list[Sample]]] = load_function(path) or pop_first
        self._filter_name = path or "pop_first"

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        with self._lock:
            groups = self._from_buffer(num_samples)
            return groups + super().get_samples(num_samples - len(groups))

    def get_fresh_samples(self, num_samples: int) -> list[list[Sample]]:
        """Groups from the prompt file, whatever is in the buffer."""
        return super().get_fresh_samples(num_samples)

    def _from_buffer(self, num_samples: int) -> list[list[Sample]]:
        if not self.buffer or num_samples == 0:
            return []
        groups = self.buffer_filter(self.args, None, self.buffer, num_samples)
        if not isinstance(groups, list) or len(groups) > num_samples:
            raise ValueError(
                f"buffer filter {self._filter_name} must return a list of at most {num_samples} groups, "
                f"got {f'{len(groups)} groups' if isinstance(groups, list) else repr(groups)[:200]}"
            )
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back. Raises ValueError for a group that has not `n_samples_per_prompt` members."""
        for group in samples:
            if not isinstance(group, list) or len(group) != self._n_samples_per_prompt:
                size = f"{len(group)} members" if isinstance(group, list) else f"the type {type(group).__name__}"
                raise ValueError(
                    f"a group that goes back must be a list of --n-samples-per-prompt {self._n_samples_per_prompt} "
                    f"samples, got {size}"
                )
        with self._lock:
            self.buffer.extend(samples)

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {**super().state_dict(), "buffer": _encode_groups(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            super().load_state_dict(state)
            self.buffer = [[_decode_member(member) for member in group] for group in state.get("buffer") or []]


def pop_first(args: Namespace, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[Any]:
    """The default buffer filter: the oldest groups, at most `num_samples`, removed from the buffer."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def state_path(directory: str, rollout_id: int) -> Path:
    """Where the state after `rollout_id` is kept in a checkpoint directory."""
    return Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"


def _encode_groups(groups: list[list[Sample]]) -> list[list[Any]]:
    """The groups as JSON-ready data; one with values that JSON cannot hold as its prompts alone, with a warning. Raises
    SampleCodecError naming the field where a prompt itself cannot be saved."""
    encoded: list[list[Any]] = []
    reasons: list[SampleCodecError] = []
    for group in groups:
        try:
            encoded.append([_encode_member(member) for member in group])
        except SampleCodecError as error:
            encoded.append([_encode_prompt(member) for member in group])
            reasons.append(error)
    if reasons:
        logger.warning(
            "%d buffered groups are saved without what they had of answers, the first because %s",
            len(reasons),
            reasons[0],
        )
    return encoded


def _encode_member(member: Sample | list[Sample]) -> Any:
    return [encode_sample(s) for s in member] if isinstance(member, list) else encode_sample(member)


def _encode_prompt(member: Sample | list[Sample]) -> Any:
    return encode_prompt(hold(member[0] if isinstance(member, list) else member))


def _decode_member(member: Any) -> Any:
    return [decode_sample(s) for s in member] if isinstance(member, list) else decode_sample(member)


def _read_json_state(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error


def _read_pt_state(path: Path) -> Any:
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def _load_dataset(args: Namespace) -> Dataset:
    from miles.utils.processing_utils import load_processor, load_tokenizer

    tokenizer = load_tokenizer(args.hf_checkpoint, chat_template_path=getattr(args, "chat_template_path", None))
    return load_prompt_dataset(args, tokenizer, load_processor(args.hf_checkpoint))
