"""An engine that joins the weight-update group and then refuses the weights: `python -m ... PORT [deaf|unwilling]`.

A deaf one does not leave the group when it is told to; an unwilling one refuses to join.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from miles.utils.process_group import destroy_process_group, init_process_group

groups: list[Any] = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200, {})

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path == "/init_weights_update_group" and "unwilling" in sys.argv:
            self._answer(400, {"success": False, "message": "will not join"})
            return
        if self.path == "/init_weights_update_group":
            groups.append(
                init_process_group(
                    backend=payload["backend"],
                    init_method=f"tcp://{payload['master_address']}:{payload['master_port']}",
                    world_size=payload["world_size"],
                    rank=payload["rank_offset"],
                    group_name=payload["group_name"],
                )
            )
        elif self.path == "/destroy_weights_update_group" and "deaf" not in sys.argv:
            while groups:
                destroy_process_group(groups.pop())
        refuses = self.path == "/update_weights_from_distributed"
        answer = {"success": False, "message": "no thanks"} if refuses else {"success": True, "message": "fine"}
        self._answer(400 if refuses else 200, answer)

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
