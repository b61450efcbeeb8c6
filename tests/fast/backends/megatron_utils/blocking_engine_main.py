"""An engine built like SGLang: HTTP answers at once, and one scheduler does everything else, in turn.

python -m ... PORT [dies|hangs]      in its first bucket; otherwise it receives what is sent
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from miles.utils.process_group import destroy_process_group
from tests.fast.backends.megatron_utils.json_engine import JsonHandler, join, serve

DIES_AFTER_SECS = 1.0  # long after the trainer's connections are full
scheduler = threading.Lock()
groups: dict[str, Any] = {}


def schedule(path: str, payload: dict[str, Any]) -> None:
    """What SGLang does in its scheduler. Raises RuntimeError where a broadcast breaks off."""
    if path == "/init_weights_update_group":
        groups[payload["group_name"]] = join(payload, timeout_secs=1800)  # as long as SGLang's
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


class Handler(JsonHandler):
    def do_POST(self) -> None:
        payload = self.payload()
        try:
            with scheduler:
                schedule(self.path, payload)
        except (RuntimeError, KeyError) as error:
            self.answer(400, {"success": False, "message": repr(error)})
        else:
            self.answer(200, {"success": True, "message": "fine"})


if __name__ == "__main__":
    serve(Handler)
