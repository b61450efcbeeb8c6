"""Before a run starts: can it fit at all? Only where it is known how much memory a GPU has."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from miles.utils.devices import cuda_device_present
from miles.utils.memory.report import Estimate
from miles.utils.memory.shape import ModelShape

if TYPE_CHECKING:
    from argparse import Namespace

logger = logging.getLogger(__name__)

_QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")


def device_memory_gib() -> float | None:
    """Memory of this machine's first GPU, in GiB; None where there is none, or nobody can tell."""
    if not cuda_device_present() or shutil.which("nvidia-smi") is None:
        return None
    try:
        answer = subprocess.run(["nvidia-smi", *_QUERY], capture_output=True, text=True, timeout=20, check=True)
        return float(answer.stdout.splitlines()[0]) / 1024
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        logger.info("nvidia-smi does not tell how much memory there is: %s", error)
        return None


def check_memory(args: Namespace) -> None:
    """Warn where the run is not expected to fit its GPUs.

    Raises ValueError where it cannot: where weights, gradients and optimizer states alone are more than a GPU has.
    """
    gpu_gib = args.gpu_memory_gib or device_memory_gib()
    if gpu_gib is None or args.no_memory_check:
        return
    try:
        shape = ModelShape.from_dir(args.hf_checkpoint)
    except ValueError as error:
        logger.info("no estimate of the memory: %s", error)  # a kind of model that it does not know
        return
    estimate = Estimate.from_args(args, shape, gpu_gib)
    if impossible := estimate.impossible():
        raise ValueError(f"this run cannot fit: {impossible}. (--no-memory-check starts it all the same)")
    problems = estimate.problems()
    if not os.environ.get("RAY_ADDRESS"):  # all trainers are on this machine
        problems += estimate.host_problems(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for problem in problems:
        logger.warning("this run may not fit: %s. `python -m miles.tools.memory` shows the estimate", problem)
