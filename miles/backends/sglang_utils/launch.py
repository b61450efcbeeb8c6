"""The command line of one SGLang server process: one engine, or one machine's part of an engine that spans several."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.backends.sglang_utils.flags import server_command_flags
from miles.utils.network import url_host

if TYPE_CHECKING:
    from argparse import Namespace

DIST_INIT_PORTS = 8
"""Ports from the one of --dist-init-addr on that an engine over several machines may use."""


@dataclass(frozen=True)
class ServerPlace:
    """Where one server process of an engine listens, and which part of the engine it is."""

    host: str
    port: int
    """HTTP. Requests go to node 0; the others answer /health only."""
    nccl_port: int
    """Where the ranks of an engine on one machine meet."""
    nodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    """host:port on node 0 where the machines of an engine meet. None for an engine on one machine."""


def sglang_engine_command(args: Namespace, place: ServerPlace, *, seed: int) -> list[str]:
    """What starts the server of an engine with `args.hf_checkpoint`, in SGLang's own spelling.

    The user's `--sglang-*` flags come last, so that they win over the defaults here. `--base-gpu-id` is 0: Ray shows
    the process the GPUs of its bundle and no others.
    """
    options = {
        "--model-path": args.hf_checkpoint,
        "--host": place.host,
        "--port": place.port,
        "--nccl-port": place.nccl_port,
        "--tp-size": args.rollout_num_gpus_per_engine,
        "--nnodes": place.nodes,
        "--node-rank": place.node_rank,
        "--dist-init-addr": place.dist_init_addr,
        "--base-gpu-id": 0,
        "--random-seed": (args.rollout_seed + seed) % 2**31,
    }
    command = [args.sglang_python or sys.executable, "-m", "sglang.launch_server"]
    for name, value in options.items():
        if value is not None:
            command += [name, str(value)]
    # The engine is asked for its health before it gets a request, and answers with a token: that warms it up.
    return [*command, "--skip-server-warmup", *server_command_flags(args)]


def meeting_point(host: str, port: int) -> str:
    """host:port as SGLang's --dist-init-addr takes it; it uses some of the ports after `port` too."""
    return f"{url_host(host)}:{port}"


def nccl_environment(args: Namespace) -> dict[str, str]:
    """Variables that a trainer sets where its environment does not, since SGLang sets them for its own ranks: members
    of one NCCL group that share memory in different ways hang."""
    if args.rollout_engine != "sglang":
        return {}
    symmetric = bool(args.sglang_enable_symm_mem)
    return {
        "NCCL_CUMEM_ENABLE": str(int(symmetric)),
        "NCCL_NVLS_ENABLE": str(int(symmetric or bool(args.sglang_enable_nccl_nvls))),
    }
