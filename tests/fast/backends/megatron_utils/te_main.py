"""Trains with Transformer Engine's layer spec, on stand-ins for its modules, and with the local one. Run by
test_transformer_engine.py in a process of its own: megatron-core looks for Transformer Engine when it is imported.

    python -m tests.fast.backends.megatron_utils.te_main DIRECTORY CONFIGURATION ...
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from tests.fast.backends.megatron_utils import stand_in_te


def run(directory: Path, name: str) -> None:
    import torch

    from miles.backends.megatron_utils.cpu_shim import install_cpu_shim

    install_cpu_shim()
    from tests.fast.backends.megatron_utils.test_on_gpu import learn, open_trainer, pretend_trainer_gpu
    from tests.fast.backends.megatron_utils.tiny_models import make_args, write_checkpoint

    checkpoint = write_checkpoint(directory / name, name)
    flags: dict[str, Any] = {"lr": 1e-3, "use_distributed_optimizer": True, "data_pad_size_multiplier": 16}
    with open_trainer(make_args(checkpoint, **flags)) as trainer:
        expected = learn(trainer, 0, 3)
        weights = {key: tensor.clone() for key, tensor in trainer.hf_named_tensors()}
        local = {type(module).__name__ for module in trainer._stages[0].modules()}
    if "moe" not in name:  # the router asks for its weight's device also when it is recomputed, unseen by the pretence
        flags |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    sets = str(directory / f"{name}-sets")
    flags |= {"save": sets, "load": sets}
    with pretend_trainer_gpu():
        with open_trainer(make_args(checkpoint, **flags)) as trainer:
            found = learn(trainer, 0, 2)
            trainer.save(1)
        with open_trainer(make_args(checkpoint, **flags)) as trainer:
            assert trainer.load() == 2
            found += learn(trainer, 2, 3)
            fused = {type(module).__name__ for module in trainer._stages[0].modules()}
            result = {key: tensor.cpu() for key, tensor in trainer.hf_named_tensors()}
    assert "PackedAttention" in local and "PackedAttention" not in fused, fused
    assert {"TEDotProductAttention", "TELayerNormColumnParallelLinear"} <= fused, fused
    assert ("TEColumnParallelGroupedLinear" in fused) == ("moe" in name), fused
    for left, right in zip(expected, found, strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert abs(value - right[key]) <= 1e-4 * max(1.0, abs(value)), (key, value, right[key])
    assert result.keys() == weights.keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(result[key], tensor, rtol=1e-3, atol=1e-5, msg=key)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    stand_in_te.install()
    for configuration in sys.argv[2:]:
        run(Path(sys.argv[1]), configuration)
