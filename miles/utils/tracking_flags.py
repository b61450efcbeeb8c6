"""Flags of metrics, logs, the run directory and checks."""

from __future__ import annotations

import importlib.util
import itertools
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from miles.utils.flag_rules import require, require_not_negative
from miles.utils.trace import DEFAULT_MAX_EVENTS

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

NO_EFFECT = {
    "wandb_always_use_train_step": "every metric of a step is logged at one step number anyway",
}


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    run = parser.add_argument_group("run directory and logging")
    run.add_argument(
        "--runs-dir",
        type=str,
        default="runs",
        help="Directory in which each run makes its own directory, named by date and time.",
    )
    run.add_argument(
        "--log-sample-interval",
        type=int,
        default=10,
        help="Print one sample (prompt, answer, reward, versions) every this many steps. 0: never.",
    )
    run.add_argument(
        "--trace-max-events",
        type=int,
        default=DEFAULT_MAX_EVENTS,
        help="Most events of prompt groups, of samples, and of everything else, in trace.json of the run directory, "
        "the timeline for https://ui.perfetto.dev; about 150 bytes each, nine a group and two a sample. 0: no such "
        "file.",
    )
    run.add_argument(
        "--check-config",
        nargs="?",
        const="changed",
        default=False,
        choices=["changed", "all"],
        help="Check the flags, print the resolved configuration as YAML, and exit. changed (also without a value): "
        "what was given or differs from its default. all: every value.",
    )
    run.add_argument(
        "--custom-config-path",
        type=str,
        default=None,
        help="YAML file of values that are set on args last, over the command line; keys that are no flags are for "
        "plug-ins. None: no file.",
    )
    run.add_argument(
        "--log-passrate", action="store_true", default=False, help="Report pass@k of the groups of each batch."
    )
    tensorboard = parser.add_argument_group("TensorBoard")
    tensorboard.add_argument(
        "--use-tensorboard",
        action="store_true",
        default=False,
        help="TensorBoard is always on: events go to tensorboard/ in the run directory. Accepted, and does nothing.",
    )
    for name in ("project", "experiment"):
        tensorboard.add_argument(
            f"--tb-{name}-name",
            type=str,
            default=None,
            help=f"Name of the {name}: a directory below tensorboard/. None: no such directory.",
        )
    wandb = parser.add_argument_group("Weights & Biases")
    wandb.add_argument("--use-wandb", action="store_true", default=False, help="Log metrics to Weights & Biases.")
    wandb.add_argument(
        "--wandb-mode",
        type=str,
        default=None,
        choices=["online", "offline", "disabled"],
        help="None: WANDB_MODE, else online. offline: write to --wandb-dir only.",
    )
    for name, what, none in (
        ("dir", "Directory of wandb's files", "the run directory"),
        ("key", "API key; better given as WANDB_API_KEY", "WANDB_API_KEY or the saved login"),
        ("host", "Address of a server of your own", "the public one"),
        ("team", "Team (entity)", "your default one"),
        ("group", "Group of the run, and the start of its name", "no group"),
        ("project", "Project", "miles"),
        ("run-id", "Id of a run to continue", "a new run"),
    ):
        wandb.add_argument(f"--wandb-{name}", type=str, default=None, help=f"{what}. None: {none}.")
    wandb.add_argument(
        "--disable-wandb-random-suffix",
        action="store_false",
        default=True,
        dest="wandb_random_suffix",
        help="Do not add a random suffix to the name of the run.",
    )
    wandb.add_argument(
        "--wandb-always-use-train-step", action="store_true", default=False, help="Log every metric by training step."
    )
    checks = parser.add_argument_group("checks")
    checks.add_argument(
        "--ci-test", action="store_true", default=False, help="Switch on --check-weight-update-equal, as tests do."
    )
    checks.add_argument(
        "--ci-disable-weight-update-checker",
        action="store_true",
        default=False,
        help="With --ci-test: do not switch it on.",
    )


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    require_not_negative(args, "log_sample_interval", "trace_max_events")
    runs = Path(args.runs_dir)
    require(not runs.exists() or runs.is_dir(), f"--runs-dir {args.runs_dir!r} is not a directory")
    require(
        not args.use_wandb or importlib.util.find_spec("wandb") is not None,
        "--use-wandb needs the package wandb. Instead: pip install -e '.[wandb]', or drop --use-wandb (metrics are "
        "always written to the run directory as JSON lines and TensorBoard events)",
    )


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    idle = sorted("--" + dest.replace("_", "-") for dest in given if dest.startswith("wandb_"))
    if idle and not args.use_wandb:
        yield f"no effect without --use-wandb: {', '.join(idle)}"


def _candidates(runs_dir: str, now: datetime | None) -> Iterator[Path]:
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    yield Path(runs_dir) / stamp
    for k in itertools.count(1):
        yield Path(runs_dir) / f"{stamp}-{k}"


def new_run_dir(runs_dir: str, now: datetime | None = None) -> str:
    """A path `<runs_dir>/<YYYYmmdd-HHMMSS>[-k]` at which nothing exists yet."""
    return str(next(path for path in _candidates(runs_dir, now) if not path.exists()))


def make_run_dir(runs_dir: str, now: datetime | None = None) -> str:
    """Make such a directory; two runs that start in the same second get two. Raises ValueError where it cannot."""
    for path in _candidates(runs_dir, now):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(f"--runs-dir {runs_dir}: cannot make {path} ({error.strerror})") from error
        return str(path)
    raise AssertionError("the candidates never end")
