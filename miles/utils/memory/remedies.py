"""What to change where a run does not fit: only what makes the estimate smaller.

flags of the run --> candidates for the part that is largest --> each one tried: an estimate with the changed flags
                                                                  smaller: it is named     not: it is left out
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.utils.memory.training import update_bucket_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miles.utils.memory.shape import ModelShape

LARGEST_STATIC_FRACTION = 0.92
"""More leaves SGLang's kernels and graphs nothing."""


@dataclass(frozen=True)
class Remedy:
    """`words`: as they stand in a sentence. `changes`: an example of flags that follow them."""

    words: str
    changes: dict[str, Any]

    def applied(self, args: Namespace) -> Namespace:
        return Namespace(**{**vars(args), **self.changes})


def effective(remedies: Iterator[Remedy], args: Namespace, measure: Callable[[Namespace], float]) -> list[Remedy]:
    """Those that make `measure` of the flags smaller; what cannot be is left out."""
    now = measure(args)
    found = []
    for remedy in remedies:
        try:
            if measure(remedy.applied(args)) < now:
                found.append(remedy)
        except ValueError:  # sizes that do not divide the model
            continue
    return found


def sentence(remedies: list[Remedy]) -> str:
    """Without a full stop: it ends what an error says."""
    words = [remedy.words for remedy in remedies]
    if not words:
        return "No flag makes that smaller: larger GPUs, or a smaller model"
    return "Instead: " + " or ".join([*([", ".join(words[:-1])] if words[:-1] else []), words[-1]])


def for_training(args: Namespace, shape: ModelShape, part: str) -> Iterator[Remedy]:
    """Candidates where `part` of the memory of a training GPU is the largest."""
    if part == "optimizer":
        yield Remedy("--optimizer-cpu-offload", {"optimizer_cpu_offload": True})
        if (getattr(args, "optimizer", None) or "adam") == "adam":
            yield Remedy("--use-distributed-optimizer", {"use_distributed_optimizer": True})
    if part == "update":
        yield Remedy(
            "a smaller --update-weight-buffer-size",
            {"update_weight_buffer_size": update_bucket_bytes(args) // 2},
        )
        return
    if part == "activations":
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        yield Remedy("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", full)
    if part in ("activations", "logits"):
        yield from _fewer_tokens(args)
        yield from shorter_samples(args, shape)
        yield _more_ranks(args, "context")
        yield _more_ranks(args, "tensor_model")
    else:
        yield _more_ranks(args, "tensor_model")
        yield _more_ranks(args, "pipeline_model")
        yield _more_ranks(args, "expert_model")


def _fewer_tokens(args: Namespace) -> Iterator[Remedy]:
    if not getattr(args, "use_dynamic_batch_size", False):
        if (size := getattr(args, "micro_batch_size", None) or 1) > 1:
            yield Remedy("a smaller --micro-batch-size", {"micro_batch_size": size // 2})
    elif tokens := getattr(args, "max_tokens_per_gpu", None):
        yield Remedy("a smaller --max-tokens-per-gpu", {"max_tokens_per_gpu": -(-int(tokens) // 2)})


def shorter_samples(args: Namespace, shape: ModelShape) -> Iterator[Remedy]:
    """By the flag that bounds the longest sample."""
    response = getattr(args, "rollout_max_response_len", None)
    context = getattr(args, "rollout_max_context_len", None) or shape.max_positions
    if response is not None:
        yield Remedy("a smaller --rollout-max-response-len", {"rollout_max_response_len": -(-int(response) // 2)})
    yield Remedy("a smaller --rollout-max-context-len", {"rollout_max_context_len": -(-int(context) // 2)})


def _more_ranks(args: Namespace, size: str) -> Remedy:
    """Twice as many ranks, on twice as many GPUs: each data-parallel rank has what it had."""
    name = f"{size}_parallel_size"
    changes = {name: 2 * int(getattr(args, name, None) or 1)}
    if size != "expert_model":
        changes["actor_num_nodes"] = 2 * int(getattr(args, "actor_num_nodes", None) or 1)
    return Remedy(f"a larger --{name.replace('_', '-')}", changes)


def for_engine(args: Namespace, shape: ModelShape) -> Iterator[Remedy]:
    """Candidates where an engine has no room for one sample."""
    ranks = int(getattr(args, "rollout_num_gpus_per_engine", None) or 1)
    if getattr(args, "rollout_engine", None) == "embedded":
        yield Remedy("--embedded-dtype bfloat16", {"embedded_dtype": "bfloat16"})
    else:
        yield Remedy("a larger --rollout-num-gpus-per-engine", {"rollout_num_gpus_per_engine": 2 * ranks})
        yield Remedy("a larger --sglang-mem-fraction-static", {"sglang_mem_fraction_static": LARGEST_STATIC_FRACTION})
    yield from shorter_samples(args, shape)
