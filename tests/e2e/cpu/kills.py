"""One epoch that is killed and resumed until it is complete, and the proof that each prompt was trained exactly once.

draw a kill from a seed -> start the run -> wait for the moment -> SIGKILL -> resume -> ... -> the last set
the last set's lineage (runs and rollouts) -> what the trainer recorded in those runs -> each prompt once
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from miles.utils import checkpoint_set
from tests.e2e.cpu.resume_plugins import record_path

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping
    from pathlib import Path

    from tests.e2e.cpu.runs import FinishedRun, Launcher, RunningRun

VICTIMS = ("driver", "rollout_manager", "trainer-0", "engine-0")
MOMENTS = ("save", "update", "train", "anytime")
PROMPTS, BATCH, SAMPLES = 192, 4, 4
POLL_SECS = 0.002
MOMENT_SECS = 120
END_SECS = 60

FLAGS = f"""
    --data-source-path tests.e2e.cpu.resume_plugins.OneEpoch
    --custom-megatron-before-train-step-hook-path tests.e2e.cpu.resume_plugins.record_forward_passes
    --rollout-batch-size {BATCH} --n-samples-per-prompt {SAMPLES}
    --async-max-concurrent-samples 32 --save-interval 1
""".split()


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and when: `delay` seconds into the first such moment after `steps` steps of the run have begun."""

    victim: str
    moment: str
    steps: int
    delay: float

    @staticmethod
    def draw(rng: random.Random, victim: str | None = None, moment: str | None = None) -> Kill:
        victim, moment = victim or rng.choice(VICTIMS), moment or rng.choice(MOMENTS)
        longest = {"save": 0.02, "update": 0.008, "train": 0.03, "anytime": 1.0}[moment]  # as long as they last
        return Kill(victim, moment, steps=rng.randint(1, 4), delay=round(rng.uniform(0.0, longest), 4))


@dataclass(frozen=True)
class Outcome:
    """What a kill has met."""

    kill: Kill
    resumed_at: int | None
    """The first rollout of the killed run; None where it was killed before its first step."""
    reached: int | None
    """The last rollout that it had begun to train on."""
    in_moment: bool
    """Whether the save (or the update) was still going on when the signal was sent."""
    left_behind: list[str]
    """Unpublished parts in the checkpoint directory after the kill."""
    newest_set: int | None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.kill), **{k: v for k, v in asdict(self).items() if k != "kill"}}


class Epoch:
    """The runs over one epoch of `prompts` prompts, which share a checkpoint directory.

    `flags` are added to theirs, `environment` to that of their processes.
    """

    def __init__(
        self,
        launcher: Launcher,
        save: Path,
        *flags: str,
        prompts: int = PROMPTS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._launcher = launcher
        self.save = save
        self._flags = flags
        self._prompts = prompts
        self._environment = environment
        self.outcomes: list[Outcome] = []

    def start(self) -> RunningRun:
        prompts = f"{self._launcher.data}/train.jsonl@[0:{self._prompts}]"
        resume = ["--load", str(self.save)] if self.save.exists() else []
        steps = ["--num-rollout", str(self._prompts // BATCH)]
        return self._launcher.start(
            *("--prompt-data", prompts, *FLAGS, *steps, "--save", str(self.save)),
            *(*resume, *self._flags),
            environment=self._environment,
        )

    def run_until(self, kill: Kill) -> Outcome | None:
        """Start (or resume) the run and kill it; None where it was complete before the moment came."""
        parts = self._unpublished()
        run = self.start()
        try:
            watch = Watch(run, self.save, ignored=parts)
            came = watch.wait_for(kill)
            in_moment = came and watch.is_on(kill.moment)
            if not came or not _kill(run.pids()[kill.victim]):
                finished = run.finish()
                assert finished.exit_code == 0, finished.output
                return None
            run_dir = run.run_dir
            if kill.victim == "driver":
                run.reap()
            else:
                finished = run.finish(timeout_secs=END_SECS)
                assert finished.exit_code == 1, finished.output
        except BaseException:
            run.end()
            raise
        begun = sorted(record_of(self.save, run_dir.name))
        outcome = Outcome(
            kill,
            resumed_at=begun[0] if begun else None,
            reached=begun[-1] if begun else None,
            in_moment=in_moment,
            left_behind=sorted(self._unpublished() - parts),
            newest_set=self.newest_set(),
        )
        self.outcomes.append(outcome)
        return outcome

    def run_to_end(self) -> FinishedRun:
        finished = self.start().finish()
        assert finished.exit_code == 0, finished.output
        return finished

    def newest_set(self) -> int | None:
        names = [path.name for path in self.save.glob("iter_*")] if self.save.exists() else []
        return max((checkpoint_set.rollout_id_of(name) for name in names), default=None)

    def check(self) -> None:
        """Raise AssertionError unless the last set is made of each prompt of the epoch, trained exactly once."""
        last = checkpoint_set.newest_readable(self.save)
        steps = self._prompts // BATCH
        assert last is not None and checkpoint_set.rollout_id_of(last) == steps - 1, f"the epoch ends at {last}"
        trained: list[str] = []
        rollouts: list[int] = []
        for leg in checkpoint_set.read_record(last)["lineage"]:
            record = record_of(self.save, leg["run"])
            for rollout_id in range(leg["first"], leg["last"] + 1):
                batch = Counter(record[rollout_id])
                assert set(batch.values()) == {SAMPLES} and len(batch) == BATCH, f"rollout {rollout_id}: {batch}"
                trained += batch
                rollouts.append(rollout_id)
        assert rollouts == list(range(steps)), rollouts
        lines = (self._launcher.data / "train.jsonl").read_text(encoding="utf-8").splitlines()[: self._prompts]
        prompts = {json.loads(line)["input"] for line in lines}
        counts = Counter(trained)
        twice = {prompt: count for prompt, count in counts.items() if count > 1}
        assert not twice, f"trained more than once: {twice}"
        assert set(counts) == prompts, f"skipped: {sorted(prompts - set(counts))}"

    def _unpublished(self) -> set[str]:
        return _unpublished(self.save)


def _kill(pid: int) -> bool:
    """False where there is no such process: the run is complete and is ending its processes."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class Watch:
    """Looks at what a run writes to know what it is doing, without a part in it."""

    def __init__(self, run: RunningRun, save: Path, *, ignored: set[str]) -> None:
        self._run = run
        self._save = save
        self._ignored = ignored

    def wait_for(self, kill: Kill) -> bool:
        """Until `delay` seconds into the moment; False where the run has ended before."""
        self._run.pids()
        deadline = time.monotonic() + MOMENT_SECS
        while len(self._begun()) < kill.steps or not self.is_on(kill.moment):
            if not self._run.is_alive():
                return False
            if time.monotonic() > deadline:
                raise AssertionError(f"{kill}: the moment did not come within {MOMENT_SECS} s")
            time.sleep(POLL_SECS)
        time.sleep(kill.delay)
        return self._run.is_alive()

    def is_on(self, moment: str) -> bool:
        if moment == "save":
            return bool(_unpublished(self._save) - self._ignored)
        if moment == "update":
            log = (self._run.run_dir / "logs" / "trainer-0.log").read_text(encoding="utf-8", errors="replace")
            return log.rfind("sending weight version") > log.rfind("the engines have weight version")
        return True

    def _begun(self) -> dict[int, list[str]]:
        return record_of(self._save, self._run.run_dir.name)


def _unpublished(save: Path) -> set[str]:
    if not save.exists():
        return set()
    return {path.name for pattern in (".part-iter_*", ".rollout-*.json") for path in save.glob(pattern)}


def record_of(save: Path, run: str) -> dict[int, list[str]]:
    """Rollout -> prompts of the samples that the run has computed gradients from. A line that is cut off is left out:
    the step behind it cannot have ended."""
    path = record_path(save, run)
    record: dict[int, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        record.setdefault(entry["rollout_id"], []).extend(entry["prompts"])
    return record
