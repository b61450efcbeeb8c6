"""Flags of SGLang servers (`--sglang-*`), of sglang-router (`--router-*`), and of how miles uses both.

The pass-through flags are data: `server_flags.tsv` and `router_flags.tsv`, written by `python -m
miles.tools.sglang_flags`, so that nothing of SGLang is imported to parse a command line. They have no default here:
None (False for a switch) leaves the choice to SGLang.
"""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from miles.backends.sglang_utils.server_rules import config_number, validate_servers
from miles.utils.flag_rules import flag_name, require, require_positive
from miles.utils.network import engine_url, is_port_available

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterable, Iterator

# miles sets these itself, for each engine or for the router.
_OWN_SERVER_FLAGS = frozenset(
    {
        *("model_path", "config", "trust_remote_code", "random_seed", "host", "port", "nccl_port", "dist_init_addr"),
        *("nnodes", "node_rank", "gpu_id_step", "base_gpu_id", "skip_server_warmup", "enable_memory_saver"),
        *("enable_return_routed_experts", "enable_return_indexer_topk"),
    }
)
# Flags of users that are not passed on: miles passes the one itself, and what the other is for is not available.
_NOT_PASSED = frozenset({"tp_size", "lora_use_virtual_experts"})
_OWN_ROUTER_FLAGS = frozenset(
    {
        *("host", "port", "worker_urls", "model_path", "tokenizer_path", "policy", "request_timeout_secs"),
        *("mini_lb", "pd_disaggregation", "dp_aware", "enable_igw", "prefill", "decode"),
        *("prefill_policy", "decode_policy", "prefill_selector", "decode_selector"),
    }
)
# Names that SGLang had before the listed version and launch scripts still pass: what they are called now.
_OLDER_SERVER_FLAGS = {
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
}
ROUTER_POLICIES = ("random", "round_robin", "cache_aware", "power_of_two", "manual")
# Read by miles itself, with either engine.
_USED_BY_MILES = frozenset({"enable_deterministic_inference"})
_OWN_ROUTER_ONLY = frozenset({"sglang_router_policy", "sglang_router_request_timeout_secs"})
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
    passed_as: str | None = None
    """What the program calls it; None: by the first of `names`."""

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
            help=f"Passed to {program} as {self.passed_as or self.names[0]}. {unset}: {program}'s own default.",
            **options,
        )

    def command_words(self, value: Any) -> list[str]:
        """What says `value` on the program's own command line; nothing where the choice is left to it."""
        if value is None or isinstance(value, bool) != (self.kind in ("switch", "boolean")):
            return []  # the latter: an older spelling of a flag of another kind with the same dest
        if value is False:
            return [name for name in self.names if name.startswith("--no-")] if self.kind == "boolean" else []
        name = self.passed_as or self.names[0]
        if value is True:
            return [name]
        return [name, *map(str, value if isinstance(value, list) else [value])]


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
    by_name = {name: flag for flag in flags for name in flag.names}
    for name, now in _OLDER_SERVER_FLAGS.items():
        if name not in by_name and now in by_name:
            dest = name[2:].replace("-", "_")
            flags.append(replace(by_name[now], names=(name,), dest=dest, passed_as=now))
    return tuple(flag for flag in flags if flag.dest not in _OWN_SERVER_FLAGS)


@cache
def router_flags() -> tuple[PassThroughFlag, ...]:
    """sglang-router's flags that users may set."""
    lines = (Path(__file__).parent / "router_flags.tsv").read_text(encoding="utf-8").splitlines()
    return tuple(flag for flag in _read(lines) if flag.dest not in _OWN_ROUTER_FLAGS)


def router_command_flags(args: Namespace) -> list[str]:
    """The command-line words for sglang-router that the user's `--router-*` flags stand for, in its own spelling."""
    return _command_words(router_flags(), args, "router")


def server_command_flags(args: Namespace) -> list[str]:
    """The command-line words for an SGLang server that the user's `--sglang-*` flags stand for, in its own spelling."""
    return _command_words((flag for flag in server_flags() if flag.dest not in _NOT_PASSED), args, "sglang")


def _command_words(flags: Iterable[PassThroughFlag], args: Namespace, prefix: str) -> list[str]:
    words: list[str] = []
    for flag in flags:
        words += flag.command_words(getattr(args, f"{prefix}_{flag.dest}", None))
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
        "--sglang-python",
        type=str,
        default=None,
        help="Python that SGLang is installed in, for an environment of its own: an interpreter at the same path on "
        "every machine with engines. None: the one that runs miles.",
    )
    group.add_argument(
        "--rollout-external",
        action="store_true",
        default=False,
        help="The engines run already, at --rollout-external-engine-addrs; the run starts none.",
    )
    group.add_argument(
        "--rollout-external-engine-addrs",
        type=str,
        nargs="+",
        default=None,
        help="host:port of each external engine. All have --rollout-num-gpus-per-engine ranks. None: without "
        "--rollout-external.",
    )
    group.add_argument(
        "--rollout-external-router",
        action="store_true",
        default=False,
        help="An sglang-router without engines runs already at --sglang-router-ip and --sglang-router-port; the run "
        "adds its engines to it and takes them out at its end.",
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
        help="Address of this machine that the run's router listens on, or that of --rollout-external-router. None: "
        "the one other machines reach it by.",
    )
    group.add_argument(
        "--sglang-router-port",
        type=int,
        default=None,
        help="Port that the run's router listens on, or that of --rollout-external-router. None: a free one.",
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


def require_free_port(flag: str, port: int, host: str, instead: str = "choose another port") -> None:
    """Raise ValueError unless a server could listen on `port`."""
    require(
        is_port_available(port, host),
        f"{flag} {port}: the port is in use on {host}. Instead: {instead}, or drop {flag} to use a free one",
    )


def _require_local_address(ip: str) -> None:
    """Raise ValueError unless a server of this machine could listen on `ip`."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError as error:
            raise ValueError(
                f"--sglang-router-ip {ip}: not an address of this machine ({error.strerror}). Instead: add "
                "--rollout-external-router where a router runs there already, or drop the flag, and the run starts one"
            ) from error


def resolve(args: Namespace) -> None:
    """Fill in the defaults that depend on other flags."""
    if args.rollout_external and args.rollout_external_engine_addrs:
        args.rollout_num_gpus = len(args.rollout_external_engine_addrs) * args.rollout_num_gpus_per_engine
    args.engine_vocab_size = config_number(args.hf_checkpoint, "vocab_size")


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule or a port is taken."""
    require_positive(args, "sglang_server_concurrency", "sglang_router_request_timeout_secs")
    _validate_router(args)
    _validate_external_engines(args)
    if args.rollout_engine == "sglang":
        require(
            args.pause_generation_mode != "in_place" or args.sglang_disable_radix_cache or args.rollout_external,
            "--pause-generation-mode in_place with --rollout-engine sglang needs --sglang-disable-radix-cache: the "
            "prefix cache survives an in-place pause and would serve entries of old weights. Instead: add it, or use "
            "--pause-generation-mode retract",
        )
        require(
            not args.check_weight_update_equal,
            "--check-weight-update-equal with --rollout-engine sglang: its /weights_checker gives sums of its own "
            "parameters (fused, one part for each rank, by a kernel of its own on a GPU), which the trainer does not "
            "have, and compares them with nothing but its own earlier ones. Instead: drop the flag; "
            "train/train_rollout_logprob_abs_diff shows whether the weights are the same",
        )
        if not args.rollout_external:
            validate_servers(args)


def _validate_router(args: Namespace) -> None:
    for dest in ("sglang_router_port", "router_prometheus_port"):
        port = getattr(args, dest)
        require(port is None or 0 < port < 65536, f"{flag_name(dest)} must be a port from 1 to 65535, got {port}")
    if args.rollout_external_router:
        require(
            args.sglang_router_ip is not None and args.sglang_router_port is not None,
            "--rollout-external-router needs --sglang-router-ip and --sglang-router-port: where it runs",
        )
        return
    host = args.sglang_router_ip or "127.0.0.1"
    if args.sglang_router_ip is not None:
        _require_local_address(args.sglang_router_ip)
    if args.sglang_router_port is not None:
        require_free_port(
            "--sglang-router-port",
            args.sglang_router_port,
            host,
            "add --rollout-external-router to use the router that runs there, choose another port",
        )
    if args.router_prometheus_port is not None:
        require_free_port("--router-prometheus-port", args.router_prometheus_port, args.router_prometheus_host or host)


def _validate_external_engines(args: Namespace) -> None:
    addresses = args.rollout_external_engine_addrs or []
    require(
        args.rollout_external == bool(addresses),
        "--rollout-external and --rollout-external-engine-addrs belong together: give both, or none of them to let the "
        "run start its engines",
    )
    for address in addresses:
        parts = urlsplit(engine_url(address))
        try:
            fits = parts.scheme == "http" and bool(parts.hostname) and bool(parts.port) and parts.path == ""
        except ValueError:  # the port is no number, or too large
            fits = False
        require(fits, f"--rollout-external-engine-addrs: {address!r} is not host:port")
    require(
        len({engine_url(address) for address in addresses}) == len(addresses),
        f"--rollout-external-engine-addrs names an engine twice: {' '.join(addresses)}",
    )


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    if args.rollout_engine == "embedded" or args.rollout_external:
        used = _USED_BY_MILES | ({"disable_radix_cache"} if args.rollout_external else set())
        passed = {f"sglang_{flag.dest}": flag.names[0] for flag in server_flags() if flag.dest not in used}
        passed["sglang_python"] = "--python"
        idle = sorted(f"--sglang-{passed[dest][2:]}" for dest in given if dest in passed)
        why = "--rollout-external: the engines run already" if args.rollout_external else None
        if idle:
            yield f"no effect with {why or '--rollout-engine embedded, which is not SGLang'}: {', '.join(idle)}"
    idle = sorted(flag_name(dest) for dest in given if dest.startswith(("router_retry_", "router_cb_")))
    if idle:
        yield f"no effect, since miles' own client decides what is sent again: {', '.join(idle)}"
    if args.rollout_external_router:
        idle = sorted(flag_name(dest) for dest in given if dest.startswith("router_") or dest in _OWN_ROUTER_ONLY)
        if idle:
            yield f"no effect with --rollout-external-router, which runs already: {', '.join(idle)}"
    if args.rollout_external and "rollout_num_gpus" in given:
        yield "--rollout-num-gpus has no effect with --rollout-external: its engines are counted"
