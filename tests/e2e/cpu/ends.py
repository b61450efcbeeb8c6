"""Runs that end because one of their processes was killed or stopped: which, how, and what the one message says.

`ENDS` are all of them. CI plays those in `IN_CI`, `tests/run_soak.sh --ends` each of them once a round.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.utils.checkpoint_set import newest_readable
from tests.kernel import TELLS_SIGNALS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.cpu.runs import Launcher

FOREVER = ("--num-rollout", "100000")
GONE_SECS = 15
HEARTBEAT_SECS = 10
NOTICED_SECS = 30
"""Until the message of a process that was stopped: the heartbeat's limit, a look more, and the end of the run."""


@dataclass(frozen=True)
class End:
    """A signal to a process, what the message says of it, and the log that it names; None for one of Ray's."""

    victim: str
    signum: signal.Signals
    named: str
    log: str | None
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.signum.name}-{self.victim}{'-tolerant' if '--use-fault-tolerance' in self.flags else ''}"

    @property
    def _how(self) -> str:
        """What the message says of the signal, where it can be known: an engine's actor is watched from elsewhere."""
        if self.signum == signal.SIGSTOP:
            return "it is stopped (SIGSTOP)"
        return "was killed by SIGKILL" if TELLS_SIGNALS and not self.victim.endswith("-actor") else ""

    def play(self, launcher: Launcher, save: Path) -> None:
        """Raises AssertionError where the run does not end soon, with one message, nothing left behind and a set."""
        heartbeat = ("--heartbeat-timeout-secs", str(HEARTBEAT_SECS))
        keep = ("--save", str(save), "--save-interval", "1")
        run = launcher.start(*FOREVER, *keep, *heartbeat, *self.flags)
        try:
            run.wait_for_steps(2)
            pid = run.pids()[self.victim]
            run.remember_processes()
            os.kill(pid, self.signum)
            finished = run.finish(timeout_secs=GONE_SECS + NOTICED_SECS)
        except BaseException:
            run.end()
            raise
        assert finished.exit_code == 1, finished.output
        assert "Traceback" not in finished.output and finished.output.count("\nmiles: ") == 1, finished.output
        message = finished.output[finished.output.index("\nmiles: ") :]
        assert self.named.format(pid=pid) in message, finished.output
        assert self._how in message, finished.output
        assert self.log is None or str(finished.run_dir / "logs" / self.log) in message, finished.output
        assert f"--load {save}" in message and newest_readable(save) is not None, finished.output
        assert run.survivors(GONE_SECS) == []


def _stopped(victim: str, log: str, *flags: str, where: str = " on ") -> End:
    named = f"{victim} (pid {{pid}}{where}"
    return End(victim, signal.SIGSTOP, named, log, flags)


def _killed(victim: str, named: str, log: str, *flags: str) -> End:
    return End(victim, signal.SIGKILL, named, log, flags)


TWO_RANKS = ("--actor-num-gpus-per-node", "2")
TOLERANT = ("--use-fault-tolerance", "--rollout-num-gpus", "2")

IN_CI = (
    _killed("engine-0", "engine-0 (pid {pid}) was killed by SIGKILL", "engine-0.log"),
    _killed("engine-0-actor", "the actor that owns engine-0 died", "engine-0.log"),
    _killed("router", "router (pid {pid}) was killed by SIGKILL", "router.log"),
    _killed("rollout_manager", "rollout_manager (pid {pid} on ", "rollout_manager.log"),
    _killed("trainer-0", "trainer-0 (pid {pid} on ", "trainer-0.log"),
    # The other rank waits for it in a collective, and must not be the one that is named.
    _stopped("trainer-1", "trainer-1.log", *TWO_RANKS),
)
ENDS = (
    *IN_CI,
    _stopped("rollout_manager", "rollout_manager.log"),
    _stopped("router", "router.log", where=") has not answered at "),
    _stopped("router", "router.log", *TOLERANT, where=") has not answered at "),
    _stopped("trainer-0", "trainer-0.log", *TOLERANT),
    End("raylet", signal.SIGSTOP, "Ray's raylet, which holds the object store, (pid {pid}) does not run", None),
    End("gcs_server", signal.SIGSTOP, "Ray's gcs_server, the cluster's control store, (pid {pid}) does not run", None),
)
