"""parallel_main whose even stages receive late, so that what the odd ones send is still on its way when they go on.

As where gloo's own thread gets no processor for a while: the receive is asked for in time, and begins later.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from miles.backends.megatron_utils.cpu_shim import install_cpu_shim

_LATE_SECS = 0.02


@dataclass(frozen=True)
class Receipt:
    received: Future[None]

    def wait(self) -> None:
        self.received.result()


def receive(tensor: Any, source: int) -> None:
    time.sleep(_LATE_SECS)
    dist.recv(tensor, source)


if __name__ == "__main__":
    install_cpu_shim()
    from megatron.core.pipeline_parallel import p2p_communication

    from tests.fast.backends.megatron_utils.parallel_main import run_rank

    at_once, receiving = p2p_communication._p2p_ops, ThreadPoolExecutor(1)

    def late(**of: Any) -> dict[str, Any]:
        if of["group"].rank() % 2:
            return at_once(**of)
        requests = at_once(**{**of, "tensor_recv_prev": None, "tensor_recv_next": None})
        for side in ("prev", "next"):
            if (tensor := of[f"tensor_recv_{side}"]) is not None:
                received = receiving.submit(receive, tensor.detach(), of[f"{side}_pipeline_rank"])
                requests[f"recv_{side}"] = Receipt(received)
        return requests

    p2p_communication._p2p_ops = late
    run_rank()
