"""`python -m miles.sim --seed 17` replays a simulated run and prints its trace; `--seeds 0:2000` runs many.

Exit code 1 where a promise is broken; the seed, its smallest failing schedule and the end of its trace are printed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from miles.sim.coverage import Coverage
from miles.sim.schedule import Schedule
from miles.sim.simulation import SimulationFailed, simulate

TRACE_LINES_OF_A_FAILURE = 60


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m miles.sim", description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="replay this seed and print its trace")
    what.add_argument("--seeds", metavar="A:B", help="run the seeds from A up to B and print what they covered")
    parser.add_argument("--minimize", action="store_true", help="shrink a failing schedule (needs Hypothesis)")
    parser.add_argument("--verbose", action="store_true", help="show the rollout's own log, too")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.CRITICAL + 1)
    try:
        return _replay(options.seed) if options.seeds is None else _run_many(*_range(parser, options.seeds))
    except SimulationFailed as failed:
        _explain(failed, minimize=options.minimize)
        return 1


def _range(parser: argparse.ArgumentParser, text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit()):
        parser.error(f"--seeds is written A:B with whole numbers, got {text!r}")
    return int(first), int(last)


def _replay(seed: int) -> int:
    schedule = Schedule.from_seed(seed)
    _say(describe(schedule))
    report = simulate(schedule)
    _say("\n".join(report.trace.lines()))
    _say(f"seed {seed}: {len(report.trace)} events in {report.seconds:.1f} s of virtual time, {report.trace.digest()}")
    return 0


def _run_many(first: int, last: int) -> int:
    coverage = Coverage()
    began = time.perf_counter()
    for seed in range(first, last):
        coverage.add(simulate(Schedule.from_seed(seed)))
    took = time.perf_counter() - began
    _say(coverage.table())
    _say(f"{took:.1f} s, {1000 * took / max(1, last - first):.1f} ms a run")
    return 0


def _explain(failed: SimulationFailed, *, minimize: bool) -> None:
    if minimize:
        from miles.sim.shrink import minimal

        failed = minimal(failed)
    _say(describe(failed.schedule))
    _say("\n".join(failed.trace.lines(last=TRACE_LINES_OF_A_FAILURE)))
    _say(f"FAILED {failed}")
    _say(f"replay: python -m miles.sim --seed {failed.schedule.seed}")


def describe(schedule: Schedule) -> str:
    """What is special about the schedule, and its faults one a line."""
    special = ", ".join(f"{name} {value}" for name, value in schedule.differences().items() if name != "faults")
    return "\n".join([f"schedule: {special}", *(f"  fault: {fault}" for fault in schedule.faults)])


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
