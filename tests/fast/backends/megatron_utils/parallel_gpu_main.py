"""parallel_main on devices that exist in name only, which meet over gloo."""

from __future__ import annotations

from miles.backends.megatron_utils.cpu_shim import install_cpu_shim

if __name__ == "__main__":
    install_cpu_shim()  # before the pretence, with which it refuses to be installed
    from tests.fast.backends.megatron_utils.parallel_main import run_rank
    from tests.fast.backends.megatron_utils.test_on_gpu import pretend_trainer_gpu

    with pretend_trainer_gpu():
        run_rank()
