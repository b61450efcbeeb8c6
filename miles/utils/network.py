"""Ports, addresses and server processes of this machine."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import time
from random import SystemRandom
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import multiprocessing
    from collections.abc import Iterable, Mapping

    Process = subprocess.Popen[Any] | multiprocessing.Process

_POLL_SECS = 0.05
_UNASSIGNED_PORTS = range(20000, 32768)


def is_port_available(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on `port` of `host` at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except (OSError, OverflowError):
            return False
        return True


def find_available_port(base_port: int = 0, host: str = "127.0.0.1", *, consecutive: int = 1) -> int:
    """A port that is free at this moment, like the `consecutive - 1` after it: any (`base_port` 0), or the first one
    from `base_port` on.

    "Any" is a random one below the range that the system hands out to connections by itself, so that hardly anything
    can take it between this look and its use. Raises RuntimeError where none is left.
    """

    def is_free(port: int) -> bool:
        return all(is_port_available(port + i, host) for i in range(consecutive))

    if base_port == 0:
        for port in SystemRandom().sample(_UNASSIGNED_PORTS, k=1000):
            if is_free(port):
                return port
        raise RuntimeError(f"no port of 1000 from {_UNASSIGNED_PORTS} is free on {host}")
    for port in range(base_port, 65536):
        if is_free(port):
            return port
    raise RuntimeError(f"no port from {base_port} to 65535 is free on {host}")


def get_host_info() -> tuple[str, str]:
    """(host name, IP address) under which other machines reach this one.

    MILES_HOST_IP sets the address; MILES_PREFER_IPV6=1 prefers an IPv6 one. A machine without a network is 127.0.0.1.
    """
    name = socket.gethostname()
    if fixed := os.environ.get("MILES_HOST_IP"):
        return name, fixed
    families = [socket.AF_INET, socket.AF_INET6]
    if os.environ.get("MILES_PREFER_IPV6", "").lower() in ("1", "true", "yes"):
        families.reverse()
    addresses = (_outgoing_address(family) for family in families)
    return name, next((address for address in addresses if address is not None), "127.0.0.1")


def _outgoing_address(family: socket.AddressFamily) -> str | None:
    """The local address of the route to the outside. Connecting a UDP socket picks the route and sends nothing."""
    outside = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"  # addresses reserved for documentation
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((outside, 9))
            return str(sock.getsockname()[0])
    except OSError:
        return None


def _wrap_ipv6(host: str) -> str:
    """`host` as it stands in a URL: an IPv6 address in brackets, everything else unchanged."""
    try:
        return f"[{ipaddress.IPv6Address(host)}]"
    except ValueError:
        return host


def url_host(host: str) -> str:
    """`host` as it stands in a URL."""
    return _wrap_ipv6(host)


def engine_url(address: str) -> str:
    """The URL of a server at `address`: host:port, with or without http:// in front."""
    return address.rstrip("/") if "://" in address else f"http://{address.rstrip('/')}"


def router_worker_base_urls(workers: Mapping[str, Any] | Iterable[str | Mapping[str, Any]]) -> list[str]:
    """The engines' URLs from a router's worker list, in order, each once.

    Takes the answer of `GET /workers` ({"workers": [{"url": ..}]}) or `GET /list_workers` ({"urls": [..]}), or such a
    list itself. A router that knows the data-parallel ranks of an engine lists it once per rank, as "url@rank".
    """
    if hasattr(workers, "keys"):
        workers = workers["workers"] if "workers" in workers else workers["urls"]  # type: ignore[index]
    urls = (str(worker if isinstance(worker, str) else worker["url"]) for worker in workers)
    return list(dict.fromkeys(_without_rank(url) for url in urls))


def _without_rank(url: str) -> str:
    base, separator, rank = url.rpartition("@")
    return base if separator and rank.isdecimal() else url


def exit_code(process: Process) -> int | None:
    """The exit code of a subprocess or multiprocessing process; None while it runs."""
    if hasattr(process, "poll"):
        code: int | None = process.poll()
        return code
    return process.exitcode


def wait_for_server_ready(host: str, port: int, process: Process | None = None, timeout: float = 30.0) -> None:
    """Block until something accepts connections at `host:port`.

    Raises RuntimeError as soon as `process` has exited, and TimeoutError after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host, port), timeout=1.0):
                return
        except OSError as error:
            if process is not None and (code := exit_code(process)) is not None:
                raise RuntimeError(
                    f"the server for {host}:{port} exited with code {code} before it listened"
                ) from error
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing listens at {host}:{port} after {timeout:g} s: {error}") from error
        time.sleep(_POLL_SECS)


def terminate_process(process: Process, timeout: float = 5.0) -> int | None:
    """End a subprocess or multiprocessing process: SIGTERM, `timeout` seconds, then SIGKILL; its exit code.

    Nothing happens to one that has ended, or was never started.
    """
    if getattr(process, "pid", None) is None:
        return None
    if exit_code(process) is None:
        process.terminate()
        if not _ended_within(process, timeout):
            process.kill()
    _ended_within(process, timeout)
    return exit_code(process)


def _ended_within(process: Process, timeout: float) -> bool:
    if hasattr(process, "join"):
        process.join(timeout)
        return exit_code(process) is not None
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    return True
