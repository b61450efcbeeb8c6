"""One epoch during which engines get faults, and the proof that nothing was lost or trained twice.

draw a fault from a seed -> wait for the moment -> send a signal, or order the fault -> wait until all engines serve
again -> ... -> the run ends by itself -> what the trainer recorded -> each prompt once
                                       -> what the engines recorded -> each had current weights before it was asked
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.e2e.cpu import faulty_server
from tests.e2e.cpu.kills import Epoch, Kill, Watch
from tests.e2e.cpu.resume_plugins import slow_down_path

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from pathlib import Path

    from tests.e2e.cpu.runs import FinishedRun, Launcher, RunningRun

NUM_ENGINES = 2
PROMPTS = 400
MOST_REQUESTS = 12

# A version that is no number, such as that of an engine which serves before it has weights, is an error here. Few
# finished groups may wait for the trainer, so that engines have something to do until the epoch ends.
FLAGS = f"""
    --rollout-num-gpus {NUM_ENGINES} --use-fault-tolerance
    --rollout-health-check-interval 1 --rollout-health-check-timeout 6 --update-weight-timeout-secs 20
    --async-data-buffer-capacity-factor 1 --max-weight-staleness 1000 --strict-weight-versions
    --check-weight-update-equal --save-interval 20
    --custom-megatron-before-train-step-hook-path tests.e2e.cpu.resume_plugins.record_forward_passes_slowly
""".split()


@dataclass(frozen=True)
class EngineFault:
    """What is done to which engine, or to the actor that owns it, and when."""

    victim: str
    kind: str
    """A signal, or one of `faulty_server.FAULTS`."""
    when: Kill
    requests: int = 0
    """The request of the rollout at which the fault begins, counted from the moment; not for signals."""

    @property
    def engine(self) -> str:
        return self.victim.removesuffix("-actor")

    @property
    def part(self) -> str:
        return "actor" if self.victim.endswith("-actor") else "server"

    def is_told_in(self, line: str) -> bool:
        """Whether this line of the console tells of the engine's loss, and why."""
        return self.engine in line and SAID[self.part, self.kind] in line and "its samples go elsewhere" in line


# What the console tells of an engine's loss. A stopped actor does no harm as long as its server lives.
SAID = {
    ("server", "SIGKILL"): "was killed by SIGKILL",
    ("server", "SIGSTOP"): "",  # it depends on who has asked it
    ("actor", "SIGKILL"): "the actor that owns",
    ("server", "error"): "answers POST",
    ("server", "silence"): "has generated nothing for",
    ("server", "cut"): "gives no answer to POST",
    ("server", "death"): "was killed by SIGKILL",
    ("server", "update-error"): "answered 500 to /update_weights_from_distributed",
    ("server", "update-silence"): "gave no answer to /update_weights_from_distributed",
    ("server", "update-cut"): "gave no answer to /update_weights_from_distributed",
    ("server", "update-death"): "was killed by SIGKILL",
}
KINDS = tuple(SAID)


def draw(rng: random.Random, kind: tuple[str, str] | None = None, moment: str | None = None) -> EngineFault:
    part, what = kind or rng.choice(KINDS)
    engine = f"engine-{rng.randrange(NUM_ENGINES)}"
    victim = f"{engine}-actor" if part == "actor" else engine
    when = Kill.draw(rng, victim, moment)
    return EngineFault(victim, what, when, rng.randint(1, MOST_REQUESTS) if what in faulty_server.FAULTS else 0)


class FaultyEpoch(Epoch):
    """An epoch that one run finishes, whatever happens to its engines."""

    def __init__(self, launcher: Launcher, save: Path) -> None:
        self._directory = save.with_name(f"{save.name}-engines")
        super().__init__(
            launcher, save, *FLAGS, prompts=PROMPTS, environment=faulty_server.environment(self._directory)
        )

    def play(self, faults: Sequence[EngineFault]) -> FinishedRun:
        """Run the epoch with these faults and check it. Raises AssertionError where something is wrong."""
        slow = slow_down_path(self.save)
        slow.parent.mkdir(parents=True, exist_ok=True)
        slow.touch()
        run = self.start()
        try:
            watch = Watch(run, self.save, ignored=set())
            for count, fault in enumerate(faults, start=1):
                assert watch.wait_for(fault.when), f"the epoch was over before {fault}"
                old = run.pids()[fault.engine]
                self._do(fault, run)
                run.wait_for_steps_where(partial(all_serve, restarts=count))
                new = run.pids()[fault.engine]
                assert new != old, fault
                run.wait_until(partial(self._has_answered, new))
                self._check_versions(fault, old, new)
            slow.unlink()
            finished = run.finish()
        except BaseException:
            run.end()
            raise
        assert finished.exit_code == 0, finished.output
        self.check()
        for fault in faults:
            assert any(map(fault.is_told_in, finished.output.splitlines())), f"{fault}: {finished.output}"
        for pid in faulty_server.recorded_pids(self._directory):
            self._check_order(pid)
        return finished

    def _do(self, fault: EngineFault, run: RunningRun) -> None:
        pid = run.pids()[fault.victim]
        if fault.kind in faulty_server.FAULTS:
            faulty_server.order(self._directory, pid, fault.kind, fault.requests)
        else:
            os.kill(pid, signal.Signals[fault.kind])

    def _check_order(self, pid: int) -> None:
        """No engine was asked for anything before it had taken part in a weight update."""
        events = [entry["event"] for entry in faulty_server.record_of(self._directory, pid)]
        assert "asked" not in events or "weights" in events[: events.index("asked")], f"engine {pid}: {events}"

    def _has_answered(self, pid: int) -> bool:
        return any(entry["event"] == "answered" for entry in faulty_server.record_of(self._directory, pid))

    def _check_versions(self, fault: EngineFault, old: int, new: int) -> None:
        """A fault that was ordered has begun, and the successor's first answer is of no older weights."""
        if fault.kind in faulty_server.FAULTS:
            before = {entry["event"]: entry["version"] for entry in faulty_server.record_of(self._directory, old)}
            after = {entry["event"]: entry["version"] for entry in faulty_server.record_of(self._directory, new)}
            assert "fault" in before, f"{fault} never began: {before}"
            assert int(after["answered"]) >= int(before["fault"] or 0), f"{fault}: {before}, then {after}"


def all_serve(steps: list[dict[str, Any]], *, restarts: int) -> bool:
    """Whether so many engines have come back, and all serve by now."""
    restarted = sum(step["rollout/engine_restarts"] for step in steps)
    return bool(steps) and restarted >= restarts and steps[-1]["rollout/engines_serving"] == NUM_ENGINES
