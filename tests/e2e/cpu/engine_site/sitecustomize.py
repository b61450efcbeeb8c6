"""Python imports this at the start of each process that has this directory on PYTHONPATH; only engines are changed."""

import sys

if sys.orig_argv[1:3] == ["-m", "miles.backends.embedded_engine"]:
    from tests.e2e.cpu.faulty_server import install

    install()
