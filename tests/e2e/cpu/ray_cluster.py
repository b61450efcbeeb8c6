"""A Ray cluster of several nodes on this machine, started the way a user starts one, for runs that join it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from miles.utils.network import find_available_port

if TYPE_CHECKING:
    from collections.abc import Iterator

_START_SECS = 120
_POLL_SECS = 0.2
_STARTED = "will now block"


@contextmanager
def ray_nodes(count: int, *, num_cpus: int) -> Iterator[dict[str, str]]:
    """`count` nodes of `num_cpus` logical CPUs, each on a loopback address of its own; the environment of a driver that
    joins them."""
    port = find_available_port(0)
    directory = Path(tempfile.mkdtemp(prefix="ray-"))  # its sockets' paths must be short
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(count):
            place = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={directory}"]
            if index > 0:
                place = [f"--address=127.0.0.2:{port}", "--dashboard-agent-listen-port=0"]
            log = directory / f"node-{index}.log"
            with log.open("wb") as output:
                command = [str(Path(sys.executable).with_name("ray")), "start", *place]
                command += [f"--node-ip-address=127.0.0.{2 + index}", f"--num-cpus={num_cpus}", "--block"]
                nodes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
            _wait_until_started(nodes[-1], log)
        yield {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"127.0.0.2:{port}"}
    finally:
        for node in nodes:
            _kill(node)
        shutil.rmtree(directory, ignore_errors=True)


def _wait_until_started(node: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECS
    while _STARTED not in (text := log.read_text(errors="replace")):
        assert node.poll() is None and time.monotonic() < deadline, f"a node of Ray did not start:\n{text}"
        time.sleep(_POLL_SECS)


def _kill(node: subprocess.Popen[bytes]) -> None:
    try:
        processes = psutil.Process(node.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        processes = []
    node.kill()
    node.wait()
    for process in processes:
        if process.is_running():
            process.kill()
