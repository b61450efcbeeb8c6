"""Prompt data sets: `.jsonl` and `.parquet` files as Samples, sliced, checked and shuffled by epoch.

    path@[a:b] --rows in file order--> keys checked, chat template --> too long: dropped or refused --> samples
                                                                                  shuffle(epoch) --> a permutation

Everything that can be wrong with the file is a ValueError here, before a run starts, and names the file, the line (row)
and the key.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.utils.types import PrefixCacheInfo, Sample, SampleStatus, SpecInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]$")
_SPECIAL_TOKENS_MARGIN = 16
_PREFIX = 32
_IMMUTABLE = frozenset({str, int, float, bool, SampleStatus})
_FLAT = frozenset({SpecInfo, PrefixCacheInfo})


@dataclass(frozen=True)
class Row:
    """One record of a data set file; `place` names it in error messages ("line 3", "row 0")."""

    place: str
    values: dict[str, Any]


@dataclass(frozen=True)
class SlicedPath:
    """A file and the rows of it to use, as in `prompts.jsonl@[100:200]`; Python's slice rules, None where open."""

    path: str
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, text: str) -> SlicedPath:
        match = _SLICE.match(text)
        if match is None:
            if "@[" in text:
                raise ValueError(f"data set {text!r}: a slice is written path@[start:stop] with whole numbers")
            return cls(text)
        bounds = [int(match[name]) if match[name] is not None else None for name in ("start", "stop")]
        return cls(match["path"], *bounds)

    def bounds(self, length: int) -> tuple[int, int]:
        """The range of row numbers in a file of `length` rows; ValueError where it leaves the file or is empty."""
        for bound in (self.start, self.stop):
            if bound is not None and not -length <= bound <= length:
                raise ValueError(f"data set {self}: {bound} is out of range, the file has {length} rows")
        start, stop, _ = slice(self.start, self.stop).indices(length)
        if self != SlicedPath(self.path) and start >= stop:
            raise ValueError(f"data set {self}: the slice is empty, the file has {length} rows")
        return start, stop

    def __str__(self) -> str:
        if self.start is None and self.stop is None:
            return self.path
        return f"{self.path}@[{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}]"


def read_rows(path: str) -> list[Row]:
    """The records of a `.jsonl` or `.parquet` file, in order, `path@[a:b]` for a part of them.

    Raises ValueError for a missing or unreadable file, a malformed line, and a slice out of range.
    """
    sliced = SlicedPath.parse(path)
    file = Path(sliced.path)
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    reader = readers.get(file.suffix)
    if reader is None:
        raise ValueError(f"data set {sliced.path}: the file name must end in {' or '.join(readers)}")
    if not file.is_file():
        raise ValueError(f"data set {sliced.path}: there is no such file")
    return list(reader(sliced))


def _read_jsonl(sliced: SlicedPath) -> Iterator[Row]:
    with open(sliced.path, "rb") as file:
        lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
    start, stop = sliced.bounds(len(lines))
    for number, line in lines[start:stop]:
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ValueError(f"data set {sliced.path}, line {number}: not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(
                f"data set {sliced.path}, line {number}: expected a JSON object, got {type(values).__name__}"
            )
        yield Row(f"line {number}", values)


def _read_parquet(sliced: SlicedPath) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(sliced.path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"data set {sliced.path}: not a readable parquet file: {error}") from error
    start, stop = sliced.bounds(table.num_rows)
    for number, values in enumerate(table.slice(start, stop - start).to_pylist(), start=start):
        yield Row(f"row {number}", values)


class Dataset:
    """The prompts of one file as Samples, in the file's order until `shuffle` is called.

    `max_length` (tokens) drops longer prompts, with a warning that counts them; `max_context_length` refuses prompts
    that leave no room in it for `response_length` tokens. Both need the tokenizer only for prompts that could be so
    long.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "input",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str | None = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
        max_context_length: int | None = None,
        response_length: int = 1,
    ) -> None:
        if multimodal_keys:
            raise ValueError(
                f"--multimodal-keys {multimodal_keys}: prompts are text only; put images into "
                "Sample.multimodal_inputs in a data source of your own (--data-source-path)"
            )
        self.path = path
        self.seed = seed
        self._reader = _SampleReader(
            path=path,
            tokenizer=tokenizer,
            prompt_key=prompt_key,
            label_key=label_key,
            tool_key=tool_key,
            metadata_key=metadata_key,
            apply_chat_template=apply_chat_template,
            chat_template_kwargs=apply_chat_template_kwargs or {},
        )
        lengths = _PromptLengths(tokenizer, apply_chat_template_kwargs or {})
        samples = [self._sample(row, lengths) for row in read_rows(path)]
        if not samples:
            raise ValueError(f"data set {path}: it is empty")
        samples = _drop_long_prompts(path, samples, lengths, max_length, max_context_length)
        _refuse_prompts_beyond_context(path, samples, lengths, max_context_length, response_length)
        self.origin_samples = samples
        self.samples = samples
        self.epoch_id: int | None = None

    def _sample(self, row: Row, lengths: _PromptLengths) -> Sample:
        sample = self._reader.sample(row)
        if lengths.is_zero(sample):
            raise self._reader.error(row, f"{self._reader.prompt_key!r} has no tokens: {sample.prompt!r:.100}")
        return sample

    def shuffle(self, epoch_id: int) -> None:
        """Put the samples into the order of an epoch: a permutation of the file's order by `seed + epoch_id` alone."""
        if self.epoch_id == epoch_id:
            return
        order = list(range(len(self.origin_samples)))
        random.Random(self.seed + epoch_id).shuffle(order)
        self.samples = [self.origin_samples[i] for i in order]
        self.epoch_id = epoch_id

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


@dataclass(frozen=True)
class _SampleReader:
    """Turns one row into one Sample, or says what is wrong with it."""

    path: str
    tokenizer: Any
    prompt_key: str
    label_key: str | None
    tool_key: str | None
    metadata_key: str | None
    apply_chat_template: bool
    chat_template_kwargs: dict[str, Any]

    def sample(self, row: Row) -> Sample:
        metadata = self._metadata(row)
        prompt = self._prompt(row, metadata.get("tools"))
        label = self._required(row, self.label_key) if self.label_key else None
        return Sample(prompt=prompt, label=label, metadata=metadata)

    def _required(self, row: Row, key: str) -> Any:
        if key not in row.values:
            raise self.error(row, f"has no key {key!r}, it has {', '.join(sorted(row.values)) or 'none'}")
        return row.values[key]

    def _metadata(self, row: Row) -> dict[str, Any]:
        metadata = self._json(row, self.metadata_key) if self.metadata_key else None
        if metadata is None:
            metadata = {}
        if not isinstance(metadata, dict):
            raise self.error(row, f"{self.metadata_key!r} must be an object, got {type(metadata).__name__}")
        tools = self._json(row, self.tool_key) if self.tool_key else None
        if tools is None:
            return dict(metadata)
        if not isinstance(tools, list):
            raise self.error(row, f"{self.tool_key!r} must be a list of tools, got {type(tools).__name__}")
        return {**metadata, "tools": tools}

    def _json(self, row: Row, key: str) -> Any:
        """An optional value that parquet files often hold as a JSON string."""
        value = row.values.get(key)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise self.error(row, f"{key!r} is a string but not valid JSON: {error}") from error

    def _prompt(self, row: Row, tools: list[Any] | None) -> str | list[dict[str, Any]]:
        prompt = self._required(row, self.prompt_key)
        is_messages = isinstance(prompt, list) and bool(prompt) and all(isinstance(m, dict) for m in prompt)
        if not isinstance(prompt, str) and not is_messages:
            raise self.error(row, f"{self.prompt_key!r} must be text or a list of messages, got {prompt!r:.100}")
        if not self.apply_chat_template:
            return prompt
        if getattr(self.tokenizer, "chat_template", "unknown") is None:
            raise self.error(
                row,
                "--apply-chat-template: the checkpoint's tokenizer has no chat template. Instead: name a file with one "
                "(--chat-template-path), or drop --apply-chat-template",
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=True, **self.chat_template_kwargs
                )
            )
        except Exception as error:  # a template is a program of the checkpoint's and may raise anything
            raise self.error(row, f"--apply-chat-template failed: {error}") from error

    def error(self, row: Row, what: str) -> ValueError:
        return ValueError(f"data set {self.path}, {row.place}: {what}")


def copy_prompt(prompt: Sample) -> Sample:
    """A deep copy of a sample; much cheaper than `copy.deepcopy` for one that has not been answered yet."""
    duplicate = copy.copy(prompt)
    duplicate.__dict__.update((name, private_copy(value)) for name, value in prompt.__dict__.items())
    return duplicate


def private_copy(value: Any) -> Any:
    """A deep copy, without the detour through `copy.deepcopy` where the value is immutable or empty."""
    kind = type(value)
    if value is None or kind in _IMMUTABLE:
        return value
    if kind in _FLAT:
        return copy.copy(value)
    if not value and kind in (list, dict):
        return kind()
    return copy.deepcopy(value)


class _PromptLengths:
    """Prompt lengths in tokens, counted only where a prompt could exceed a limit.

    A text of n UTF-8 bytes has at most n tokens and a few special ones, so most prompts are not counted.
    """

    def __init__(self, tokenizer: Any, chat_template_kwargs: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._chat_template_kwargs = chat_template_kwargs

    def is_zero(self, sample: Sample) -> bool:
        """Whether the prompt has no tokens at all: it is empty, or the tokenizer knows none of its characters."""
        if not isinstance(sample.prompt, str):
            return False  # messages: a template puts its own tokens around them
        # The beginning tells nearly always, whatever the length.
        return not (self._count(sample.prompt[:_PREFIX]) or self._count(sample.prompt))

    def exceeds(self, sample: Sample, limit: int) -> int | None:
        """The prompt's number of tokens where it is greater than `limit`, else None."""
        if not isinstance(sample.prompt, str):
            text = self._tokenizer.apply_chat_template(
                sample.prompt,
                tools=sample.metadata.get("tools"),
                tokenize=False,
                add_generation_prompt=True,
                **self._chat_template_kwargs,
            )
        else:
            text = sample.prompt
        if len(text.encode()) + _SPECIAL_TOKENS_MARGIN <= limit:
            return None
        length = self._count(text)
        return length if length > limit else None

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))


def _drop_long_prompts(
    path: str, samples: list[Sample], lengths: _PromptLengths, max_length: int | None, max_context_length: int | None
) -> list[Sample]:
    if max_length is None or (max_context_length is not None and max_length >= max_context_length - 1):
        return samples
    kept = [sample for sample in samples if lengths.exceeds(sample, max_length) is None]
    if len(kept) < len(samples):
        logger.warning(
            "data set %s: %d of %d prompts are longer than the limit of %d tokens and are left out",
            path,
            len(samples) - len(kept),
            len(samples),
            max_length,
        )
    if not kept:
        raise ValueError(
            f"data set {path}: all {len(samples)} prompts are longer than the limit of {max_length} tokens"
        )
    return kept


def _refuse_prompts_beyond_context(
    path: str, samples: list[Sample], lengths: _PromptLengths, max_context_length: int | None, response_length: int
) -> None:
    if max_context_length is None:
        return
    limit = max_context_length - response_length
    too_long = {i: n for i, sample in enumerate(samples) if (n := lengths.exceeds(sample, limit)) is not None}
    if too_long:
        first, length = next(iter(too_long.items()))
        answer = "an answer" if response_length == 1 else f"an answer of {response_length} tokens"
        remedy = "raise" if response_length == 1 else "cut the answers to what is left with"
        raise ValueError(
            f"data set {path}: {len(too_long)} of {len(samples)} prompts leave no room for {answer} in the context of "
            f"{max_context_length} tokens; the first is number {first} (counted from 0) with {length} tokens. Remove "
            f"them, leave them out with --rollout-max-prompt-len (--eval-max-prompt-len), or {remedy} "
            "--rollout-max-context-len"
        )
