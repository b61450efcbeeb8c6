"""The process that compares mathematical answers with math-verify: one JSON line in, one JSON line out.

    {"given": "0.5", "expected": "1/2", "limit": 10}  ->  {"equivalent": true}

It ends with its standard input. Sympy can compute for ever, or in C code that no Python signal interrupts: `limit`
seconds later the kernel's alarm ends the process. Memory is bounded too, so that 9^9^9^9 is an exception.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES = 4 << 30


def equivalent(given: str, expected: str) -> bool:
    from math_verify import parse, verify

    gold, answer = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (expected, given))
    return bool(gold and answer and verify(gold, answer, timeout_seconds=None))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request. What the library cannot compare, for whatever reason, is not equivalent."""
    signal.alarm(max(1, round(request["limit"])))
    try:
        return {"equivalent": equivalent(request["given"], request["expected"])}
    except Exception as error:  # parsers and sympy raise anything on odd input; the next request must not notice
        return {"equivalent": False, "error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        signal.alarm(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes our input
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
    logging.disable(logging.WARNING)
    equivalent("1", "1")  # import the library before the first request's time runs
    _write({"ready": True})
    for line in sys.stdin:
        _write(answer(json.loads(line)))


def _write(reply: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
