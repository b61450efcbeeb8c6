"""An engine that joins the weight-update group and then refuses the weights: `python -m ... PORT [deaf|unwilling]`.

A deaf one does not leave the group when it is told to; an unwilling one refuses to join.
"""

from __future__ import annotations

import sys
from typing import Any

from miles.utils.process_group import destroy_process_group
from tests.fast.backends.megatron_utils.json_engine import JsonHandler, join, serve

groups: list[Any] = []


class Handler(JsonHandler):
    def do_POST(self) -> None:
        payload = self.payload()
        if self.path == "/init_weights_update_group" and "unwilling" in sys.argv:
            self.answer(400, {"success": False, "message": "will not join"})
            return
        if self.path == "/init_weights_update_group":
            groups.append(join(payload))
        elif self.path == "/destroy_weights_update_group" and "deaf" not in sys.argv:
            while groups:
                destroy_process_group(groups.pop())
        refuses = self.path == "/update_weights_from_distributed"
        answer = {"success": False, "message": "no thanks"} if refuses else {"success": True, "message": "fine"}
        self.answer(400 if refuses else 200, answer)


if __name__ == "__main__":
    serve(Handler)
