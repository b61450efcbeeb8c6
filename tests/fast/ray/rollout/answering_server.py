"""A server process of a few lines that answers 200 to everything."""

from __future__ import annotations

import sys

_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.ThreadingHTTPServer.allow_reuse_address = False
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def answering_server(port: int) -> list[str]:
    """The command that starts it; it ends where the port is taken."""
    return [sys.executable, "-c", _SERVER, str(port)]
