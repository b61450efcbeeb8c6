"""What a launch script would run, and what the parser would say of it on a machine with GPUs, asked on one without.

    script --shims of python and ray--> the command line and environment that it ends in
    command line --parser that believes in CUDA and SGLang--> accepted, or mistakes

A checkpoint here is the real model's config.json with a tokenizer of the quickstart and a weight file without weights:
all that a command line is checked against.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.quickstart.make_base_model import make_tokenizer
from miles.backends.megatron_utils.hf_config import SUPPORTED_MODEL_TYPES
from miles.ray.preflight import preflight
from miles.utils import arguments, refused_flags
from miles.utils.refused_values import REFUSED_VALUES

if TYPE_CHECKING:
    from argparse import Namespace

    import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = Path(__file__).with_name("configs")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}>"
PROBLEM = {"prompt": [{"role": "user", "content": "What is 2 + 2? Answer: "}], "label": "4"}

_SHIM = """\
#!{python}
import json, os, sys
with open({record!r}, "a") as file:
    file.write(json.dumps({{"argv": sys.argv, "environment": dict(os.environ), "cwd": os.getcwd()}}) + "\\n")
"""


@dataclass(frozen=True)
class Command:
    """The last command that a script came to: its words after the program's name, and its environment."""

    argv: list[str]
    environment: dict[str, str]
    cwd: str


@dataclass(frozen=True)
class Verdict:
    """What is not available in this release, what is wrong all the same, and `args` where nothing is."""

    args: Namespace | None = None
    not_yet: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def make_checkpoint(directory: Path, name: str) -> Path:
    """A directory that looks like the checkpoint `name` (a file of configs/) to everything that reads no weights."""
    directory.mkdir(parents=True)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
    header = b"{}"
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory


def make_math_data(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in ("dapo-math-17k.jsonl", "aime-2024.jsonl"):
        (directory / name).write_text(f"{json.dumps(PROBLEM)}\n" * 4)
    return directory


class Shims:
    """`python` and `ray` that write down how they are called, and do nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._record = directory / "calls.jsonl"
        for name in ("python", "ray"):
            shim = directory / name
            shim.write_text(_SHIM.format(python=sys.executable, record=str(self._record)))
            shim.chmod(0o755)

    def last_command_of(self, command: list[str], **environment: str) -> Command:
        """Run `command` with the shims first on PATH and return the last call of one."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("MILES_", "RAY_"))}
        own |= {"PATH": f"{self.directory}:{os.environ['PATH']}", **environment}
        result = subprocess.run(
            command, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=50, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        call = json.loads(self._record.read_text().splitlines()[-1])
        return Command(call["argv"][1:], call["environment"], call["cwd"])


def check(
    command: Command, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, has_gpus: bool = True
) -> Verdict:
    """What train_async.py would say to this command on a machine that has SGLang, and CUDA devices or none."""
    assert Path(command.argv[0]).name == "train_async.py", command.argv
    argv = command.argv[1:]
    pretend(monkeypatch, has_gpus=has_gpus)
    name = arguments.EXPERIMENTAL_ROLLOUT_ENV
    monkeypatch.setenv(name, command.environment.get(name, ""))
    given, _, _ = arguments.build_parser(argv=argv).read(argv)
    not_yet = open_refusals(given)
    # Once more as if the open rows were gone: what they hide, and what only follows from them, is told apart.
    monkeypatch.setattr(refused_flags, "REFUSED_VALUES", ())
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        try:
            args = arguments._parse(None, argv, arguments.validate_for_async_driver, preflight)
        except ValueError as error:
            return Verdict(not_yet=not_yet, mistakes=[line for line in str(error).splitlines() if line not in not_yet])
    return Verdict(args, not_yet, warnings=[record.getMessage() for record in caplog.records])


def pretend(monkeypatch: pytest.MonkeyPatch, *, has_gpus: bool) -> None:
    """Let every module that asks what the machine has believe in SGLang, and in GPUs and Transformer Engine or not."""
    answers = {
        "cuda_device_present": lambda: has_gpus,
        "sglang_installed": lambda: True,
        "transformer_engine_installed": lambda: has_gpus,
    }
    arguments.flag_modules()  # loads those that ask
    for name, module in list(sys.modules.items()):
        if name.startswith("miles.") and name != "miles.utils.memory.check":  # that one asks a real GPU for its memory
            for function, answer in answers.items():
                if hasattr(module, function):
                    monkeypatch.setattr(module, function, answer)


def open_refusals(args: Namespace) -> list[str]:
    """The messages about `args` that only say "not in this release": they go with the rows that they come from."""
    flags = {refused.flag for refused in REFUSED_VALUES}
    lines = [refused.message for refused in refused_flags.refused(args) if refused.flag in flags]
    model_type = _config(args).get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        config = f"{args.hf_checkpoint}/config.json"
        lines.append(f"--hf-checkpoint: {config}: model_type {model_type!r} is not supported; supported: {supported}")
    return lines


def _config(args: Namespace) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
    return config
