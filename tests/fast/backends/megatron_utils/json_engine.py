"""What engines that are made for one test have in common: JSON over HTTP, and the trainer's group."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from miles.utils.process_group import init_process_group


class JsonHandler(BaseHTTPRequestHandler):
    """Every GET is answered with 200; `do_POST` is for the engine to write."""

    def do_GET(self) -> None:
        self.answer(200, {})

    def payload(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        return body

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


def join(payload: dict[str, Any], timeout_secs: float = 60) -> Any:
    """The group that /init_weights_update_group asks for."""
    return init_process_group(
        backend=payload["backend"],
        init_method=f"tcp://{payload['master_address']}:{payload['master_port']}",
        world_size=payload["world_size"],
        rank=payload["rank_offset"],
        group_name=payload["group_name"],
        timeout_secs=timeout_secs,
    )


def serve(handler: type[JsonHandler]) -> None:
    """At the port that is the first word of the command line."""
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), handler).serve_forever()
