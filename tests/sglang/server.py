"""An unmodified SGLang on a machine without a GPU, for tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

SELECTED = "sglang" in os.environ.get("MILES_CONTRACT_ENGINES", "").split(",")
"""Whether tests with real SGLang run; tests/run_sglang.sh says so."""

PYTHON = os.environ.get("MILES_SGLANG_PYTHON", sys.executable)
"""What SGLang is installed in."""

# One thread: with more, the small kernels of a small model wait for each other (20 times slower). Bytecode is written,
# whatever the environment says: compiling what they import costs each of a server's three processes 11 s.
ENVIRONMENT = {
    "SGLANG_PLATFORM": "miles_cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "",
}

# Without the prefix cache, which would serve entries of old weights after an in-place pause.
SERVER_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--disable-overlap-schedule", "--max-total-tokens", "16384", "--max-running-requests", "16"),
    "--disable-radix-cache",
)

_START_SECS = 300
_STOP_SECS = 15


class SglangServer:
    """A server of `model` on the loopback address, from the block's start to its end."""

    def __init__(self, model: Path, log: Path) -> None:
        self.model = model
        self._log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        command = [
            *(PYTHON, "-m", "sglang.launch_server", "--model-path", str(self.model), "--skip-server-warmup"),
            *("--host", "127.0.0.1", "--port", str(self.port), *SERVER_FLAGS),
        ]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=os.environ | ENVIRONMENT, stdout=output, stderr=output, start_new_session=True
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + _START_SECS
        while True:
            assert self.process.poll() is None, self._log.read_text(errors="replace")[-5000:]
            assert time.monotonic() < deadline, self._log.read_text(errors="replace")[-5000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=30):
                    return
            except OSError:  # not listening yet, or 503
                time.sleep(0.5)

    def _end(self) -> None:
        """The server and the processes that it started: its session."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(_STOP_SECS)
