"""An engine built like SGLang: HTTP answers at once, and one scheduler does everything else, in turn.

python -m ... PORT [dies|hangs]      in its first bucket; otherwise it receives what is sent
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist

from miles.utils.process_group import destroy_process_group, init_process_group

DIES_AFTER_SECS = 1.0  # long after the trainer's connections are full
scheduler = threading.Lock()
groups: dict[str, Any] = {}


def schedule(path: str, payload: dict[str, Any]) -> None:
    """What SGLang does in its scheduler. Raises RuntimeError where a broadcast breaks off."""
    if path == "/init_weights_update_group":
        groups[payload["group_name"]] = init_process_group(
            backend=payload["backend"],
            init_method=f"tcp://{payload['master_address']}:{payload['master_port']}",
            world_size=payload["world_size"],
            rank=payload["rank_offset"],
            group_name=payload["group_name"],
            timeout_secs=1800,  # as long as SGLang's
        )
    elif path == "/destroy_weights_update_group":
        destroy_process_group(groups.pop(payload["group_name"]))
    elif path == "/update_weights_from_distributed":
        if "dies" in sys.argv:
            time.sleep(DIES_AFTER_SECS)
            os._exit(1)
        if "hangs" in sys.argv:
            time.sleep(600)
        for shape, dtype in zip(payload["shapes"], payload["dtypes"], strict=True):
            dist.broadcast(
                torch.empty(shape, dtype=getattr(torch, dtype)), group_src=0, group=groups[payload["group_name"]]
            )


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200, {})

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        try:
            with scheduler:
                schedule(self.path, payload)
        except (RuntimeError, KeyError) as error:
            self._answer(400, {"success": False, "message": repr(error)})
        else:
            self._answer(200, {"success": True, "message": "fine"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
