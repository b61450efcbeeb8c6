"""Which GPUs an actor sees."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from miles.ray import own_gpus


@pytest.mark.parametrize(
    ("numbers", "before", "after"),
    [
        (["3"], None, "3"),  # Ray is told to leave the variable alone
        (["6", "7"], "0,1,2,3,4,5,6,7", "6,7"),
        (["2"], "2", "2"),  # Ray has set it
        ([], "", ""),  # an actor without GPUs
    ],
)
def test_an_actor_sees_the_gpus_that_ray_gave_it(
    numbers: list[str], before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": numbers, "TPU": []})
    monkeypatch.setattr(own_gpus.ray, "get_runtime_context", lambda: context)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    own_gpus.see_own_gpus_only()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == after
