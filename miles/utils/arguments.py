"""The command line: every flag, its rules, and which rollout functions run.

Flags are declared beside their owners, in the modules of `FLAG_MODULES`. Each has `add_flags(parser)` and may have

* `check_conflicts(args)`: combinations that are refused, before anything else is looked at;
* `resolve(args)`: fills in defaults that depend on other flags;
* `validate(args)`: raises ValueError naming the flag, the rule and the value;
* `warnings(args, given)`: legal values without effect; `NO_EFFECT`: dest -> why a flag never has one here;
* `PLUGIN_PATHS`: dests that hold dotted paths, each imported before the run starts.

    argv -> plug-ins' add_arguments -> parse -> YAML -> conflicts -> refused -> finite -> resolve -> validate -> args

Nothing heavy is imported: torch, Ray and SGLang start only after the command line is known to be good.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

import yaml

from miles.utils import refused_flags
from miles.utils.config_text import check_report
from miles.utils.devices import cuda_device_present, sglang_installed
from miles.utils.flag_parser import FlagParser
from miles.utils.flag_rules import (
    EXPERIMENTAL_ROLLOUT_ENV,
    class_based_rollout_enabled,
    flag_name,
    require_file,
    require_finite,
)
from miles.utils.misc import load_function
from miles.utils.mistakes import Mistakes
from miles.utils.tracking_flags import make_run_dir, new_run_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

logger = logging.getLogger(__name__)

FLAG_MODULES = (
    "miles.rollout.flags",
    "miles.rollout.data_flags",
    "miles.rollout.eval_flags",
    "miles.rollout.reward_flags",
    "miles.rollout.inference_rollout.flags",
    "miles.backends.training_utils.flags",
    "miles.backends.megatron_utils.flags",
    "miles.backends.megatron_utils.parallel_flags",
    "miles.backends.megatron_utils.model_shape_flags",
    "miles.ray.flags",
    "miles.ray.fault_flags",
    "miles.backends.embedded_engine.flags",
    "miles.backends.sglang_utils.flags",
    "miles.utils.http_flags",
    "miles.utils.memory.flags",
    "miles.utils.tracking_flags",
)
"""Dotted names, loaded when a command line is parsed, so that utils imports nothing above it."""

STANDARD_ROLLOUT_CLASS = "miles.rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn"
STANDARD_ROLLOUT_FUNCTION = "miles.rollout.sglang_rollout.generate_rollout"
FULLY_ASYNC_ROLLOUT_CLASS = "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn"


def flag_modules() -> list[ModuleType]:
    """The modules of `FLAG_MODULES`, imported."""
    return [importlib.import_module(name) for name in FLAG_MODULES]


def build_parser(add_custom_arguments: Callable[[Any], Any] | None = None, argv: list[str] | None = None) -> FlagParser:
    """A parser with every flag: miles' own, those of `add_custom_arguments` and of the plug-ins that `argv` names."""
    parser = FlagParser()
    for module in flag_modules():
        module.add_flags(parser)
    own = _option_names(parser)
    if add_custom_arguments is not None:
        _add_foreign_flags(parser, add_custom_arguments, "add_custom_arguments")
    for dest, path in _functions_with_flags(argv or []).items():
        add_arguments = getattr(_load_plugin(dest, path), "add_arguments", None)
        if add_arguments is not None:
            _add_foreign_flags(parser, add_arguments, f"{flag_name(dest)} {path}")
    available = _option_names(parser)
    parser.plugin_flags = available - own
    refused_flags.add_flags(parser, parser.plugin_flags)
    parser.refused_flags = _option_names(parser) - available
    parser.refused_families = refused_flags.REFUSED_FAMILIES
    return parser


def _option_names(parser: FlagParser) -> frozenset[str]:
    return frozenset(name for action in parser.actions() for name in action.option_strings)


def _add_foreign_flags(parser: FlagParser, add_arguments: Callable[[Any], Any], owner: str) -> None:
    try:
        add_arguments(parser)
    except ArgumentError as error:
        raise ValueError(f"{owner} declares a flag that exists already: {error}") from error


def _functions_with_flags(argv: list[str]) -> dict[str, str]:
    """The plug-ins that may declare flags of their own, as `argv` names them: dest -> dotted path."""
    first = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for dest in ("rollout_function_path", "custom_generate_function_path"):
        first.add_argument(flag_name(dest), default=None, nargs="?")
    known, _ = first.parse_known_args(argv)
    return {dest: path for dest, path in vars(known).items() if path}


def _load_plugin(dest: str, path: str) -> Any:
    """What the dotted path in the flag `dest` names; ValueError naming the flag where it cannot be imported."""
    try:
        return load_function(path)
    except ValueError as error:
        raise ValueError(f"{flag_name(dest)}: {error}") from error
    except Exception as error:  # A user's module may raise anything while it is imported; the flag must be named.
        raise ValueError(f"{flag_name(dest)} {path!r}: importing it raised {type(error).__name__}: {error}") from error


def resolve_rollout_function_paths(args: Namespace) -> tuple[str, str]:
    """(rollout, eval): the dotted paths of the two functions that run. The only place where this is decided.

    Rollout is --rollout-function-path, else the standard one: a class where MILES_EXPERIMENTAL_ROLLOUT_REFACTOR is set,
    a function where it is not. Eval is --eval-function-path, else the same as rollout. Only then does --fully-async
    replace rollout, so eval keeps the standard function unless told otherwise.
    """
    standard = STANDARD_ROLLOUT_CLASS if class_based_rollout_enabled() else STANDARD_ROLLOUT_FUNCTION
    rollout = getattr(args, "rollout_function_path", None) or standard
    evaluation = getattr(args, "eval_function_path", None) or rollout
    if getattr(args, "fully_async", False):
        rollout = FULLY_ASYNC_ROLLOUT_CLASS
    return rollout, evaluation


def check_runtime_env(args: Namespace, env_vars: Mapping[str, str]) -> None:
    """Raise ValueError unless `env_vars`, the environment of Ray's workers, chooses the rollout API that is needed."""
    if getattr(args, "fully_async", False) and not class_based_rollout_enabled(env_vars):
        raise ValueError(
            f"--fully-async needs {EXPERIMENTAL_ROLLOUT_ENV}=1 in Ray's workers too, and runtime_env lacks it. "
            f'Instead: add {{"env_vars": {{"{EXPERIMENTAL_ROLLOUT_ENV}": "1"}}}} to runtime_env.'
        )


def validate_for_sync_driver(args: Namespace) -> None:
    """What train.py cannot do."""
    if args.fully_async:
        raise ValueError(
            "--fully-async is refused by train.py, where each rollout ends before its training step begins. "
            "Instead: run train_async.py --fully-async"
        )
    if args.update_weights_interval != 1:
        raise ValueError(
            f"--update-weights-interval is {args.update_weights_interval}, and train.py updates the weights after "
            "every rollout. Instead: 1, or train_async.py"
        )


def validate_for_async_driver(args: Namespace) -> None:
    """What train_async.py cannot do."""
    if args.colocate:
        raise ValueError(
            "--colocate is refused by train_async.py: rollout must go on while training runs. Instead: devices of "
            "their own for the engines (--rollout-num-gpus)"
        )


def parse_args(add_custom_arguments: Callable[[Any], Any] | None = None, argv: list[str] | None = None) -> Namespace:
    """Parse and check the command line (`argv`, default `sys.argv[1:]`); see the module docstring for the order.

    `add_custom_arguments(parser)` may declare further flags. With --check-config the resolved configuration goes to
    standard output and the process exits with 0.

    Raises ValueError, with one line for each mistake found together.
    """
    return _parse(add_custom_arguments, argv)


def parse_or_exit(
    driver_rules: Callable[[Namespace], None] | None = None,
    add_custom_arguments: Callable[[Any], Any] | None = None,
    argv: list[str] | None = None,
    preflight: Callable[[Namespace], None] | None = None,
) -> Namespace:
    """`parse_args` for a driver: a mistake becomes one message on standard error and exit status 2.

    The run directory is made here, so that two runs that start together get two.

    `driver_rules` is `validate_for_sync_driver` or `validate_for_async_driver`; `preflight` looks at what the valid
    flags name (prompt files, packages), and --check-config does so too.
    """
    try:
        args = _parse(add_custom_arguments, argv, driver_rules, preflight)
        args.run_dir = make_run_dir(args.runs_dir)
    except ValueError as error:
        sys.stderr.write(f"{os.path.basename(sys.argv[0])}: error: {error}\n")
        raise SystemExit(2) from None
    return args


def _parse(
    add_custom_arguments: Callable[[Any], Any] | None,
    argv: list[str] | None,
    driver_rules: Callable[[Namespace], None] | None = None,
    preflight: Callable[[Namespace], None] | None = None,
) -> Namespace:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser(add_custom_arguments, argv)
    args, given, unreadable = parser.read(argv)
    if unreadable:
        raise ValueError("\n".join([*unreadable, *refused_flags.refusals(args, parser.plugin_flags)]))
    if args.custom_config_path:
        given |= apply_config_file(args, args.custom_config_path, parser)
    _validate(args, given, parser, driver_rules)
    if preflight is not None:
        preflight(args)
    if args.check_config:
        sys.stdout.write(check_report(args, given, parser.defaults()))
        raise SystemExit(0)
    return args


def _validate(
    args: Namespace,
    given: frozenset[str],
    parser: FlagParser,
    driver_rules: Callable[[Namespace], None] | None,
) -> None:
    """All rules, in the order of the module docstring. Fills in the derived values of `args`.

    A mistake ends the rules of its module; those of the others are checked all the same and reported with it.
    """
    modules = flag_modules()
    mistakes = Mistakes()
    rules = [driver_rules] if driver_rules is not None else []
    for rule in [*rules, *(module.check_conflicts for module in modules if hasattr(module, "check_conflicts"))]:
        with mistakes.collecting():
            rule(args)
    if args.rollout_engine is None and cuda_device_present() and (args.sglang_python or sglang_installed()):
        args.rollout_engine = "sglang"
    _refuse_what_is_not_available(args, parser, mistakes)
    _refuse_infinite_numbers(args, parser, mistakes)
    with mistakes.collecting():
        _choose_devices(args, given)
    resolved = []
    for module in modules:
        with mistakes.collecting():
            if hasattr(module, "resolve"):
                module.resolve(args)
            resolved.append(module)
    for module in resolved:
        with mistakes.collecting():
            if hasattr(module, "validate"):
                module.validate(args)
    _check_plugins(args, given, modules, mistakes)
    mistakes.raise_any()
    for line in no_effect_warnings(args, given, modules):
        logger.warning("%s", line)
    args.rollout_function_path, args.eval_function_path = resolve_rollout_function_paths(args)
    args.run_dir = new_run_dir(args.runs_dir)


def _refuse_what_is_not_available(args: Namespace, parser: FlagParser, mistakes: Mistakes) -> None:
    """Add a mistake for each flag and value that is not available, unless it is reported already.

    The rules that follow see the default instead, so that nothing is reported that only follows from it.
    """
    defaults = parser.defaults()
    for refused in refused_flags.refused(args, parser.plugin_flags):
        if not mistakes.mentions(refused.flag):
            mistakes.add([refused.message])
        if defaults[refused.dest] is not None:
            setattr(args, refused.dest, defaults[refused.dest])


def _refuse_infinite_numbers(args: Namespace, parser: FlagParser, mistakes: Mistakes) -> None:
    """Add a mistake for each float flag that is NaN or infinite; the rules that follow see its default instead."""
    defaults = parser.defaults()
    for dest in parser.float_dests():
        try:
            require_finite(args, dest)
        except ValueError as error:
            if not mistakes.mentions(flag_name(dest)):
                mistakes.add([str(error)])
            setattr(args, dest, defaults[dest])


def _choose_devices(args: Namespace, given: frozenset[str]) -> None:
    """Fill in what depends on the machine: the engine's device and the trainer's communication backend."""
    cuda = cuda_device_present()
    if args.rollout_engine is None:
        lacking = "sglang" if cuda else "CUDA device"
        raise ValueError(
            f"--rollout-engine is required: SGLang, the default, needs a CUDA device and the package sglang, and there "
            f"is no {lacking} here. Instead: --rollout-engine embedded, or name it: --rollout-engine sglang"
        )
    if args.embedded_device is None:
        args.embedded_device = "cuda" if cuda else "cpu"
    if not cuda:
        if args.embedded_device == "cuda":
            raise ValueError("--embedded-device cuda: this machine has no CUDA device. Instead: cpu, or drop the flag")
        if args.distributed_backend == "nccl":
            if "distributed_backend" in given:
                raise ValueError("--distributed-backend nccl: this machine has no CUDA device. Instead: gloo")
            args.distributed_backend = "gloo"
    elif args.distributed_backend == "gloo":
        raise ValueError("--distributed-backend gloo: the trainer uses nccl on CUDA devices. Instead: drop the flag")


def _check_plugins(args: Namespace, given: frozenset[str], modules: list[ModuleType], mistakes: Mistakes) -> None:
    """Import each dotted path that the user gave, so that a mistake is known before anything starts."""
    for dest in [dest for module in modules for dest in getattr(module, "PLUGIN_PATHS", ())]:
        path = getattr(args, dest)
        if dest in given and path:
            with mistakes.collecting():
                target = _load_plugin(dest, path)
                if not callable(target):
                    raise ValueError(
                        f"{flag_name(dest)} {path!r} names a {type(target).__name__}, not a function or class"
                    )


def no_effect_warnings(args: Namespace, given: frozenset[str], modules: list[ModuleType]) -> list[str]:
    """A line for each legal value that the user gave and that has no effect."""
    lines = []
    for module in modules:
        for dest, why in getattr(module, "NO_EFFECT", {}).items():
            if dest in given:
                lines.append(f"{flag_name(dest)} has no effect here because {why}")
        if hasattr(module, "warnings"):
            lines += module.warnings(args, given)
    return lines


def apply_config_file(args: Namespace, path: str, parser: FlagParser) -> frozenset[str]:
    """Set the values of the YAML file `path` on `args`, over the command line; returns the dests that it set.

    A key that is a flag (with - or _) is checked like one; any other key is for plug-ins and set as it is.
    Raises ValueError for a missing file, one that is not a YAML mapping, and a value of the wrong type.
    """
    flag = "--custom-config-path"
    require_file(flag, path, "the configuration file")
    with open(path, encoding="utf-8") as file:
        try:
            content = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise ValueError(f"{flag}: {path} is not valid YAML: {error}") from error
    if content is None:
        return frozenset()
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{flag}: {path} must be a mapping of names to values")
    changed = set()
    for key, value in content.items():
        dest = key.replace("-", "_") if parser.action_for(key.replace("-", "_")) is not None else key
        setattr(args, dest, parser.check_type(dest, value, path))
        changed.add(dest)
    return frozenset(changed)
