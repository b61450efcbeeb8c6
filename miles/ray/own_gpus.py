"""Which GPUs an actor's process, and what it starts, may see."""

from __future__ import annotations

import os

import ray


def see_own_gpus_only() -> None:
    """Show this process the GPUs that Ray gave the actor, numbered from 0. To be called before CUDA is used.

    Ray does so itself, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set, as for other programs on the same
    cluster: every rank would take the machine's first GPU then.
    """
    numbers = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if numbers:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)
