"""Estimate the memory of a run before it is started: for each training GPU and each engine GPU.

    python -m miles.tools.memory --hf-checkpoint DIR [any flags of train.py and train_async.py] [--gpu-memory-gib 80]

Takes every flag of a launch script, so that its words can be pasted; only config.json of the checkpoint is read. Exits
with 0 where the run is expected to fit, 1 with the reason where it is not, 2 where a flag is wrong.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from miles.backends.megatron_utils import flags as megatron_flags
from miles.backends.megatron_utils import parallel_flags
from miles.backends.training_utils.flags import data_parallel_size
from miles.ray import flags as placement_flags
from miles.utils.arguments import apply_config_file, build_parser
from miles.utils.flag_rules import require, require_finite, require_fraction, require_positive
from miles.utils.memory import flags as memory_flags
from miles.utils.memory.check import device_memory_gib
from miles.utils.memory.report import Estimate
from miles.utils.memory.shape import ModelShape
from miles.utils.mistakes import Mistakes

if TYPE_CHECKING:
    from argparse import Namespace

ASSUMED_GIB = 80.0


def estimate(argv: list[str]) -> Estimate:
    """The estimate for these words of a command line. Raises ValueError naming what is wrong with them."""
    args = _parse(argv)
    require_finite(args, "gpu_memory_gib")
    if not args.hf_checkpoint:
        raise ValueError("--hf-checkpoint is required: a directory with the model's config.json")
    gpu_gib = args.gpu_memory_gib or device_memory_gib() or ASSUMED_GIB
    shape = ModelShape.from_dir(args.hf_checkpoint)
    _check(args)
    return Estimate.from_args(args, shape, gpu_gib)


def _parse(argv: list[str]) -> Namespace:
    """The values as given: what only a real run needs, such as prompts and devices, is not looked for."""
    parser = build_parser(None, argv)
    args, _, unreadable = parser.read(argv)
    if mistakes := [line for line in unreadable if "is required" not in line]:
        raise ValueError("\n".join(mistakes))
    if args.custom_config_path:
        apply_config_file(args, args.custom_config_path, parser)
    return args


def _check(args: Namespace) -> None:
    """Fill in what other flags imply, and raise ValueError where what the estimate reads breaks a rule of a run."""
    mistakes = Mistakes()
    for owner in (megatron_flags, parallel_flags, placement_flags):
        owner.resolve(args)
    for rule in (data_parallel_size, parallel_flags.validate, placement_flags.validate, memory_flags.validate, _sizes):
        with mistakes.collecting():
            rule(args)
    mistakes.raise_any()


def _sizes(args: Namespace) -> None:
    require_positive(args, "micro_batch_size", "max_tokens_per_gpu")
    require_positive(args, "rollout_max_context_len", "rollout_max_response_len", "rollout_max_prompt_len")
    require_fraction(args, "sglang_mem_fraction_static")
    require(
        not args.use_dynamic_batch_size or args.max_tokens_per_gpu is not None,
        "--use-dynamic-batch-size needs --max-tokens-per-gpu, the most tokens of one micro batch",
    )


def main(argv: list[str] | None = None) -> int:
    try:
        found = estimate(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        sys.stderr.write(f"memory: error: {error}\n")
        return 2
    sys.stdout.write(found.table() + "\n")
    problems = found.problems()
    for problem in problems:
        sys.stderr.write(f"does not fit: {problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
