"""Plug-ins of the kill tests: a data source of one epoch, and a record of what the trainer has really trained on."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from miles.rollout.data_source import RolloutDataSourceWithBuffer

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.utils.types import Sample


SLOW_STEP_SECS = 1.0


class OneEpoch(RolloutDataSourceWithBuffer):
    """Ends with the first epoch instead of starting the next one."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        assert self.dataset is not None
        fresh = len(self.dataset) - self.sample_offset
        return super().get_samples(min(num_samples, self.get_buffer_length() + fresh))


class ForwardRecorder:
    """Appends one line for each training forward pass: the rollout, and the prompts read out of the model's input.

    It knows nothing of groups, indices or data sources: what is recorded is what gradients were computed from.
    """

    def __init__(self, args: Namespace) -> None:
        from transformers import AutoTokenizer

        self.rollout_id = -1
        self._tokenizer: Any = AutoTokenizer.from_pretrained(args.hf_checkpoint)
        self._path = record_path(Path(args.save), Path(args.run_dir).name)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        tokens, ends = inputs[0][0].tolist(), keywords["packed_seq_params"].cu_seqlens_q.tolist()
        texts = [self._tokenizer.decode(tokens[a:b]) for a, b in pairwise(ends)]
        prompts = [text[: text.index(">") + 1] for text in texts]
        line = json.dumps({"rollout_id": self.rollout_id, "prompts": prompts}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def record_path(save: Path, run: str) -> Path:
    """Where the run of this name records, beside its checkpoints."""
    return save.with_name(f"{save.name}-trained") / f"{run}.jsonl"


def record_forward_passes(
    args: Namespace, rollout_id: int, step_id: int, model: list[torch.nn.Module], optimizer: Any, scheduler: Any
) -> None:
    """For `--custom-megatron-before-train-step-hook-path`."""
    recorder = getattr(model[0], "forward_recorder", None)
    if recorder is None:
        recorder = ForwardRecorder(args)
        setattr(model[0], "forward_recorder", recorder)  # noqa: B010 - modules declare what may be assigned
        model[0].register_forward_pre_hook(recorder, with_kwargs=True)
    recorder.rollout_id = rollout_id


def slow_down_path(save: Path) -> Path:
    """While this file exists, `record_forward_passes_slowly` is slow."""
    return save.with_name(f"{save.name}-slow")


def record_forward_passes_slowly(args: Namespace, *rest: Any) -> None:
    """Like `record_forward_passes`, and long enough for engines to die, start and join within one epoch."""
    record_forward_passes(args, *rest)
    if slow_down_path(Path(args.save)).exists():
        time.sleep(SLOW_STEP_SECS)
