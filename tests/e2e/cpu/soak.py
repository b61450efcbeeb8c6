"""Many epochs that are killed at random moments and resumed; see `tests/run_soak.sh`.

One round is one epoch in which each kind of process is killed once, in a random order, each at a random moment. With
`--faults` it is one run with fault tolerance that ends by itself although FAULTS_A_ROUND times an engine gets a fault.
With `--ends` it is one run for each process whose death, or whose stopping without dying, ends a run: what it says, and
what it leaves.
The seed decides everything that the test decides. `results.jsonl` (`faults.jsonl`) gets one line a round, so a soak
that is stopped goes on where it was; `python -m tests.e2e.cpu.soak --out DIR --table` shows what is there.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from examples.quickstart.prepare import prepare
from tests.e2e.cpu.ends import ENDS
from tests.e2e.cpu.engine_faults import KINDS, EngineFault, FaultyEpoch, draw
from tests.e2e.cpu.kills import MOMENTS, VICTIMS, Epoch, Kill
from tests.e2e.cpu.runs import Launcher

RESULTS, FAULT_RESULTS, END_RESULTS = "results.jsonl", "faults.jsonl", "ends.jsonl"
FAULTS_A_ROUND = 4
RUN_SECS = 400  # a soak may share its machine


def main() -> int:
    options = _parse()
    results = options.out / (END_RESULTS if options.ends else FAULT_RESULTS if options.faults else RESULTS)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.table:
        _soak(options, results)
    rounds = _read(results)
    print(table_of_ends(rounds) if options.ends else table_of_faults(rounds) if options.faults else table(rounds))
    failed = [r for r in rounds if r["error"]]
    for r in failed:
        print(f"seed {r['seed']} FAILED: {r['error']}")
    return 1 if failed or not rounds else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="directory of the results")
    parser.add_argument("--rounds", type=int, default=20, help="epochs; each kills every kind of process once")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first round")
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no round after this time")
    parser.add_argument("--faults", action="store_true", help="faults of engines in runs with --use-fault-tolerance")
    parser.add_argument("--ends", action="store_true", help="every process that ends a run, killed and stopped")
    parser.add_argument("--table", action="store_true", help="only print the results that are there")
    return parser.parse_args()


def _soak(options: argparse.Namespace, results: Path) -> None:
    started = time.monotonic()
    done = {r["seed"] for r in _read(results)}
    data = prepare(options.out / "data", steps=300).resolve()
    for seed in range(options.first_seed, options.first_seed + options.rounds):
        if seed in done:
            continue
        if time.monotonic() - started > 60 * options.minutes:
            print(f"{options.minutes:g} minutes are over: seeds from {seed} on were not run; start again to go on")
            return
        play_round = play_ends if options.ends else play_faults if options.faults else play
        result = play_round(seed, options.out.resolve(), data)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        good = "one message each" if options.ends else "every prompt once"
        print(f"seed {seed}: {result['error'] or good}, {result['seconds']:.0f} s", flush=True)


def play(seed: int, out: Path, data: Path) -> dict[str, Any]:
    """One round. Its files are kept where it failed."""
    directory = out / f"seed-{seed}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    rng = random.Random(seed)
    victims = rng.sample(VICTIMS, len(VICTIMS))
    epoch = Epoch(Launcher(directory, data, timeout_secs=RUN_SECS), directory / "checkpoints")
    started, error = time.monotonic(), ""
    try:
        for victim in victims:
            if epoch.run_until(Kill.draw(rng, victim)) is None:
                break  # the epoch was complete; the kills that were made count
        epoch.run_to_end()
        epoch.check()
    except AssertionError as failure:
        error = str(failure)[-2000:] or repr(failure)
    if not error:
        shutil.rmtree(directory)
    kills = [outcome.to_dict() for outcome in epoch.outcomes]
    return {"seed": seed, "error": error, "seconds": round(time.monotonic() - started, 1), "kills": kills}


def play_faults(seed: int, out: Path, data: Path) -> dict[str, Any]:
    """One round with faults of engines. Its files are kept where it failed."""
    directory = out / f"faults-seed-{seed}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    rng = random.Random(seed)
    faults = [draw(rng) for _ in range(FAULTS_A_ROUND)]
    epoch = FaultyEpoch(Launcher(directory, data, timeout_secs=RUN_SECS), directory / "checkpoints")
    started, error = time.monotonic(), ""
    try:
        epoch.play(faults)
    except AssertionError as failure:
        error = str(failure)[-2000:] or repr(failure)
    if not error:
        shutil.rmtree(directory)
    seconds = round(time.monotonic() - started, 1)
    return {"seed": seed, "error": error, "seconds": seconds, "faults": [_fault_record(fault) for fault in faults]}


def play_ends(seed: int, out: Path, data: Path) -> dict[str, Any]:
    """One round of ends, in an order that the seed gives. The files of those that failed are kept."""
    directory = out / f"ends-seed-{seed}"
    shutil.rmtree(directory, ignore_errors=True)
    started, errors, passed = time.monotonic(), [], []
    for number, end in enumerate(random.Random(seed).sample(ENDS, len(ENDS))):
        place = directory / str(number)
        place.mkdir(parents=True)
        try:
            end.play(Launcher(place, data, timeout_secs=RUN_SECS), place / "checkpoints")
        except AssertionError as failure:
            errors.append(f"{end}: {str(failure)[-2000:] or repr(failure)}")
        else:
            passed.append(str(end))
            shutil.rmtree(place)
    seconds = round(time.monotonic() - started, 1)
    return {"seed": seed, "error": "\n".join(errors), "seconds": seconds, "ends": passed}


def table_of_ends(rounds: list[dict[str, Any]]) -> str:
    count = Counter(end for r in rounds for end in r["ends"])
    return "\n".join(
        ["| end | good |", "|---|---|", *(f"| {end} | {count[end]} |" for end in sorted(set(map(str, ENDS))))]
    )


def _fault_record(fault: EngineFault) -> dict[str, Any]:
    when = {"moment": fault.when.moment, "delay": fault.when.delay, "requests": fault.requests}
    return {"victim": fault.part, "kind": fault.kind, **when}


def table_of_faults(rounds: list[dict[str, Any]]) -> str:
    """Faults by kind and moment, of the rounds that passed. A fault that an engine is ordered to have begins at one of
    its requests, and not at the moment of the order."""
    passed = [r for r in rounds if not r["error"]]
    columns = (*MOMENTS, "a request")
    count = Counter(
        (f["victim"], f["kind"], "a request" if f["requests"] else f["moment"]) for r in passed for f in r["faults"]
    )
    lines = ["| fault | " + " | ".join(columns) + " | all |", "|---|" + "---|" * (len(columns) + 1)]
    for victim, kind in KINDS:
        cells = [count[victim, kind, column] for column in columns]
        lines.append(f"| {victim} {kind} | " + " | ".join(map(str, [*cells, sum(cells)])) + " |")
    lines.append(f"{len(rounds)} runs, {len(passed)} of them with every prompt trained exactly once")
    return "\n".join(lines)


def table(rounds: list[dict[str, Any]]) -> str:
    """Kills by victim and moment; for save and update how many were still inside it when the signal was sent."""
    count: Counter[tuple[str, str]] = Counter()
    inside: Counter[tuple[str, str]] = Counter()
    for kill in (kill for r in rounds for kill in r["kills"]):
        key = (kill["victim"], kill["moment"])
        count[key] += 1
        inside[key] += kill["in_moment"]
    lines = ["| killed | " + " | ".join(MOMENTS) + " | all |", "|---|" + "---|" * (len(MOMENTS) + 1)]
    for victim in VICTIMS:
        cells = [
            f"{count[victim, m]} ({inside[victim, m]} inside)" if m in ("save", "update") else str(count[victim, m])
            for m in MOMENTS
        ]
        lines.append(f"| {victim} | " + " | ".join(cells) + f" | {sum(count[victim, m] for m in MOMENTS)} |")
    passed = sum(not r["error"] for r in rounds)
    lines.append(f"{len(rounds)} epochs, {passed} of them with every prompt trained exactly once")
    return "\n".join(lines)


def _read(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
