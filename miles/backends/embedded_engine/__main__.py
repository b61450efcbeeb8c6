"""`python -m miles.backends.embedded_engine`: serve a model until SIGTERM, SIGINT, or the death of the parent."""

from __future__ import annotations

import os
import signal
import sys

from miles.backends.embedded_engine.config import parse_config


def main() -> None:
    config = parse_config()
    # The imports below take a second: until the server handles signals itself, ending is simply ending.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    from miles.backends.embedded_engine.process import serve

    code = serve(config)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a weight call that hangs in a collective must not hold the process up.
    os._exit(code)


if __name__ == "__main__":
    main()
