"""Flags of SGLang servers (`--sglang-*`), of sglang-router (`--router-*`), and of how miles uses both.

The pass-through flags are data: `server_flags.tsv` and `router_flags.tsv`, written by `python -m
miles.tools.sglang_flags`, so that nothing of SGLang is imported to parse a command line. They have no default here:
None (False for a switch) leaves the choice to SGLang.
"""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.utils.flag_rules import flag_name, require, require_positive
from miles.utils.network import is_port_available

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

# miles sets these itself, for each engine or for the router.
_OWN_SERVER_FLAGS = frozenset(
    {
        *("model_path", "config", "trust_remote_code", "random_seed", "host", "port", "nccl_port", "dist_init_addr"),
        *("nnodes", "node_rank", "gpu_id_step", "base_gpu_id", "skip_server_warmup", "enable_memory_saver"),
        *("enable_return_routed_experts", "enable_return_indexer_topk"),
    }
)
_OWN_ROUTER_FLAGS = frozenset(
    {
        *("host", "port", "worker_urls", "model_path", "tokenizer_path", "policy", "request_timeout_secs"),
        *("mini_lb", "pd_disaggregation", "dp_aware", "enable_igw", "prefill", "decode"),
        *("prefill_policy", "decode_policy", "prefill_selector", "decode_selector"),
    }
)
# Names that SGLang before 0.5.20 had and launch scripts still pass.
_OLDER_SERVER_FLAGS = (
    "--cuda-graph-bs\tcuda_graph_bs\tlist\tint",
    "--cuda-graph-max-bs\tcuda_graph_max_bs\tvalue\tint",
    "--disable-cuda-graph\tdisable_cuda_graph\tswitch\tstr",
    "--enable-dp-attention\tenable_dp_attention\tswitch\tstr",
)
ROUTER_POLICIES = ("random", "round_robin", "cache_aware", "power_of_two", "manual")
# Read by miles itself, with either engine.
_USED_BY_MILES = frozenset({"enable_deterministic_inference"})
_KINDS: dict[str, dict[str, Any]] = {
    "switch": {"action": "store_true", "default": False},
    "boolean": {"action": argparse.BooleanOptionalAction, "default": None},
    "value": {"default": None},
    "list": {"nargs": "*", "default": None},
    "optional": {"nargs": "?", "default": None},
}


@dataclass(frozen=True)
class PassThroughFlag:
    """One flag of a program that miles starts: `names` as that program spells them, `kind` a key of `_KINDS`."""

    names: tuple[str, ...]
    dest: str
    kind: str
    value_type: type

    def add_to(self, group: argparse._ArgumentGroup, prefix: str, program: str) -> None:
        """Declare `--<prefix>-<name>` with dest `<prefix>_<dest>`."""
        names = [f"--{prefix}-{name[2:]}" for name in self.names if not name.startswith("--no-")]
        options = dict(_KINDS[self.kind])
        if self.kind not in ("switch", "boolean"):
            options["type"] = self.value_type
        unset = "Off" if self.kind == "switch" else "None"
        group.add_argument(
            *names,
            dest=f"{prefix}_{self.dest}",
            help=f"Passed to {program} as {self.names[0]}. {unset}: {program}'s own default.",
            **options,
        )


def _read(lines: list[str]) -> list[PassThroughFlag]:
    flags = []
    for line in lines:
        if line.startswith("#") or not line.strip():
            continue
        names, dest, kind, value_type = line.split("\t")
        flags.append(
            PassThroughFlag(tuple(names.split("|")), dest, kind, {"int": int, "float": float}.get(value_type, str))
        )
    return flags


@cache
def server_flags() -> tuple[PassThroughFlag, ...]:
    """SGLang's server flags that users may set."""
    lines = (Path(__file__).parent / "server_flags.tsv").read_text(encoding="utf-8").splitlines()
    flags = _read(lines)
    known = {name for flag in flags for name in flag.names}
    older = [flag for flag in _read(list(_OLDER_SERVER_FLAGS)) if flag.names[0] not in known]
    return tuple(flag for flag in flags + older if flag.dest not in _OWN_SERVER_FLAGS)


@cache
def router_flags() -> tuple[PassThroughFlag, ...]:
    """sglang-router's flags that users may set."""
    lines = (Path(__file__).parent / "router_flags.tsv").read_text(encoding="utf-8").splitlines()
    return tuple(flag for flag in _read(lines) if flag.dest not in _OWN_ROUTER_FLAGS)


def router_command_flags(args: Namespace) -> list[str]:
    """The command-line words for sglang-router that the user's `--router-*` flags stand for, in its own spelling."""
    words: list[str] = []
    for flag in router_flags():
        value = getattr(args, f"router_{flag.dest}", None)
        if value is None or value is False:
            continue
        words.append(flag.names[0])
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    group = parser.add_argument_group("engines and router")
    group.add_argument(
        "--rollout-engine",
        type=str,
        default=None,
        choices=["embedded", "sglang"],
        help="Inference server that generates. None: sglang where a CUDA device and the package are present; elsewhere "
        "it must be named.",
    )
    group.add_argument(
        "--sglang-server-concurrency",
        type=int,
        default=512,
        help="Most samples in flight at one engine, with either engine.",
    )
    group.add_argument(
        "--sglang-router-ip",
        type=str,
        default=None,
        help="Address of this machine that the run's router listens on. None: the one other machines reach it by.",
    )
    group.add_argument(
        "--sglang-router-port",
        type=int,
        default=None,
        help="Port that the router listens on. None: a free one.",
    )
    group.add_argument(
        "--sglang-router-policy",
        type=str,
        default=None,
        choices=ROUTER_POLICIES,
        help="How the router chooses an engine. None: its own default, cache_aware.",
    )
    group.add_argument(
        "--sglang-router-request-timeout-secs",
        type=int,
        default=14400,
        help="Longest time of one request in the router, seconds.",
    )
    router = parser.add_argument_group("sglang-router", "Passed on to the router that the run starts.")
    for flag in router_flags():
        flag.add_to(router, "router", "sglang-router")
    server = parser.add_argument_group("SGLang servers", "Passed to each server; no effect with the embedded engine.")
    for flag in server_flags():
        flag.add_to(server, "sglang", "SGLang")


def require_free_port(flag: str, port: int, host: str) -> None:
    """Raise ValueError unless a server could listen on `port`."""
    require(
        is_port_available(port, host),
        f"{flag} {port}: the port is in use on {host}. Instead: choose another port, or drop {flag} to use a free one",
    )


def _require_local_address(ip: str) -> None:
    """Raise ValueError unless a server of this machine could listen on `ip`."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError as error:
            raise ValueError(
                f"--sglang-router-ip {ip}: not an address of this machine ({error.strerror}), and a router that runs "
                "elsewhere is not available yet. Instead: drop the flag, and the run starts its own router"
            ) from error


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule or a port is taken."""
    require_positive(args, "sglang_server_concurrency", "sglang_router_request_timeout_secs")
    for dest in ("sglang_router_port", "router_prometheus_port"):
        port = getattr(args, dest)
        require(
            port is None or 0 < port < 65536, f"--{dest.replace('_', '-')} must be a port from 1 to 65535, got {port}"
        )
    host = args.sglang_router_ip or "127.0.0.1"
    if args.sglang_router_ip is not None:
        _require_local_address(args.sglang_router_ip)
    if args.sglang_router_port is not None:
        require_free_port("--sglang-router-port", args.sglang_router_port, host)
    if args.router_prometheus_port is not None:
        require_free_port("--router-prometheus-port", args.router_prometheus_port, args.router_prometheus_host or host)
    if args.rollout_engine == "sglang":
        require(
            args.pause_generation_mode != "in_place" or args.sglang_disable_radix_cache,
            "--pause-generation-mode in_place with --rollout-engine sglang needs --sglang-disable-radix-cache: the "
            "prefix cache survives an in-place pause and would serve entries of old weights. Instead: add it, or use "
            "--pause-generation-mode retract",
        )


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    if args.rollout_engine == "embedded":
        passed = {f"sglang_{flag.dest}": flag.names[0] for flag in server_flags() if flag.dest not in _USED_BY_MILES}
        idle = sorted(f"--sglang-{passed[dest][2:]}" for dest in given if dest in passed)
        if idle:
            yield f"no effect with --rollout-engine embedded, which is not SGLang: {', '.join(idle)}"
    idle = sorted(flag_name(dest) for dest in given if dest.startswith(("router_retry_", "router_cb_")))
    if idle:
        yield f"no effect, since miles' own client decides what is sent again: {', '.join(idle)}"
