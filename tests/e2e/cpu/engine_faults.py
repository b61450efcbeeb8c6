"""One epoch during which engines are killed or stopped, and the proof that nothing was lost or trained twice.

draw a fault from a seed -> wait for the moment -> SIGKILL or SIGSTOP -> wait until all engines serve again -> ...
the run ends by itself -> what the trainer recorded -> each prompt once
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.e2e.cpu.kills import Epoch, Kill, Watch
from tests.e2e.cpu.resume_plugins import slow_down_path

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from pathlib import Path

    from tests.e2e.cpu.runs import FinishedRun, Launcher

NUM_ENGINES = 2
PROMPTS = 400

# A version that is no number, such as that of an engine which serves before it has weights, is an error here.
FLAGS = f"""
    --rollout-num-gpus {NUM_ENGINES} --use-fault-tolerance
    --rollout-health-check-interval 1 --rollout-health-check-timeout 8
    --max-weight-staleness 1000 --strict-weight-versions --check-weight-update-equal --save-interval 20
    --custom-megatron-before-train-step-hook-path tests.e2e.cpu.resume_plugins.record_forward_passes_slowly
""".split()


@dataclass(frozen=True)
class EngineFault:
    """What is done to which engine, or to the actor that owns it, and when."""

    victim: str
    signum: signal.Signals
    when: Kill


KINDS = (("server", "SIGKILL"), ("server", "SIGSTOP"), ("actor", "SIGKILL"))
"""A stopped actor does no harm as long as its server lives."""


def draw(rng: random.Random, kind: tuple[str, str] | None = None, moment: str | None = None) -> EngineFault:
    part, signal_name = kind or rng.choice(KINDS)
    engine = f"engine-{rng.randrange(NUM_ENGINES)}"
    victim = f"{engine}-actor" if part == "actor" else engine
    return EngineFault(victim, signal.Signals[signal_name], Kill.draw(rng, victim, moment))


class FaultyEpoch(Epoch):
    """An epoch that one run finishes, whatever happens to its engines."""

    def __init__(self, launcher: Launcher, save: Path) -> None:
        super().__init__(launcher, save, *FLAGS, prompts=PROMPTS)

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
                os.kill(run.pids()[fault.victim], fault.signum)
                run.wait_for_steps_where(partial(all_serve, restarts=count))
            slow.unlink()
            finished = run.finish()
        except BaseException:
            run.end()
            raise
        assert finished.exit_code == 0, finished.output
        self.check()
        return finished


def all_serve(steps: list[dict[str, Any]], *, restarts: int) -> bool:
    """Whether so many engines have come back, and all serve by now."""
    restarted = sum(step["rollout/engine_restarts"] for step in steps)
    return bool(steps) and restarted >= restarts and steps[-1]["rollout/engines_serving"] == NUM_ENGINES
