"""Python imports this at the start of each process that has this directory on PYTHONPATH; only SGLang's are changed."""

import os
import sys

if "MILES_TEST_SGLANG_FAULTS" in os.environ and any("multiprocessing" in word for word in sys.orig_argv[1:3]):
    from tests.sglang.faulty_scheduler import install

    install()
