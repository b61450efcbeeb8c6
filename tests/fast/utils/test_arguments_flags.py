"""Every flag that users of the plug-in interface pass is declared as documented, or refused by name."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from miles.utils.arguments import flag_modules
from miles.utils.refused_flags import REFUSED_FLAGS
from miles.utils.refused_values import REFUSED_VALUES
from tests.fast.utils.command_lines import CommandLine

if TYPE_CHECKING:
    from miles.utils.flag_parser import FlagParser

LISTS = Path(__file__).parent / "flag_lists"
REPOSITORY = Path(__file__).resolve().parents[3]
REFUSED = {refused.flag: (refused, refusal) for refusal in REFUSED_FLAGS for refused in refusal.flags}


def interface_flags() -> list[list[str]]:
    """(group, flag, type or action, default, choices/nargs) of each row."""
    lines = (LISTS / "interface_flags.tsv").read_text().splitlines()
    return [(line.split("\t") + [""] * 5)[:5] for line in lines if not line.startswith("#")]


def script_flags() -> list[str]:
    lines = (LISTS / "script_flags.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


INTERFACE = interface_flags()
ALL_FLAGS = [row[1] for row in INTERFACE] + script_flags()


@pytest.fixture(scope="module")
def actions(parser: FlagParser) -> dict[str, argparse.Action]:
    """Every declared flag, by name."""
    return {name: action for action in parser.actions() for name in action.option_strings}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    return CommandLine.create(tmp_path_factory.mktemp("command_line"))


@pytest.fixture
def command_line(files: CommandLine, plain_machine: None) -> CommandLine:
    """As everywhere, but with one set of files for the hundreds of cases here."""
    return files


def test_the_lists_are_whole():
    assert len(INTERFACE) == 318
    assert len(ALL_FLAGS) == len(set(ALL_FLAGS)) > 400


def test_each_flag_is_declared(actions: dict[str, argparse.Action]):
    assert [flag for flag in ALL_FLAGS if flag not in actions] == []


# Flags whose type or default differs from the list, each for a reason.
RESOLVED_LATER = {
    "--prometheus-port": "the list's default reads an environment variable",
    "--env-report": "the list's default reads an environment variable",
    "--update-weight-buffer-size": "the list writes the number as a product",
    "--train-memory-margin-bytes": "the list writes the number as a power",
    "--ft-components": "refused",
    "--object-store-backend": "refused",
    "--tito-model": "refused",
}


@pytest.mark.parametrize("row", INTERFACE, ids=lambda row: row[1])
def test_each_flag_has_the_documented_default_and_type(row: list[str], actions: dict[str, argparse.Action]):
    _, flag, kind, default, extra = row
    action = actions[flag]
    if kind in ("store_true", "store_false"):
        assert action.nargs == 0
        assert action.default is (kind == "store_false")
        return
    if kind == "argparse.BooleanOptionalAction":
        assert isinstance(action, argparse.BooleanOptionalAction)
        return
    if flag in RESOLVED_LATER:
        return
    if default:
        assert _plain(action.default) == _plain(ast.literal_eval(default))
    if flag in REFUSED:
        return
    expected = {"int": int, "float": float, "str": str}.get(kind)
    if expected is not None:
        assert action.type is expected
    assert action.required == ("required=True" in extra)
    choices = re.search(r"choices=(\[.*?\])", extra)
    if choices:
        assert list(action.choices or ()) == ast.literal_eval(choices[1])
    nargs = re.search(r"nargs='(.)'", extra)
    if nargs:
        assert action.nargs == nargs[1]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return list(value)
    return {} if value == "{}" else value


SAMPLES = {
    "--advantage-estimator": "gspo",
    "--loss-type": "sft_loss",
    "--kl-loss-type": "k3",
    "--pause-generation-mode": "in_place",
    "--optimizer": "sgd",
    "--lr-decay-style": "cosine",
    "--train-backend": "megatron",
    "--distributed-backend": "gloo",
    "--qkv-format": "thd",
    "--megatron-to-hf-mode": "raw",
    "--update-weight-transfer-mode": "broadcast",
    "--transformer-impl": "local",
    "--wandb-mode": "offline",
    "--recompute-granularity": "full",
    "--recompute-method": "uniform",
    "--moe-token-dispatcher-type": "alltoall",
    "--normalization": "RMSNorm",
    "--position-embedding-type": "rope",
    "--apply-chat-template-kwargs": '{"enable_thinking": false}',
    "--sglang-router-policy": "round_robin",
    "--lr-warmup-fraction": "0.1",
    "--adam-beta1": "0.8",
    "--adam-beta2": "0.9",
    "--rollout-top-p": "0.9",
    "--gamma": "0.9",
    "--rm-type": "math",
    "--eval-prompt-data": "{prompts}",
    "--hf-checkpoint": "{checkpoint}",
    "--prompt-data": "{prompts}",
    "--ref-load": "{checkpoint}",
    "--chat-template-path": "{prompts}",
    "--data-source-path": "miles.rollout.data_source.RolloutDataSource",
    "--global-batch-size": "8",
    "--num-steps-per-rollout": "2",
    "--over-sampling-batch-size": "8",
    "--async-max-concurrent-samples": "8",
    "--rollout-batch-size": "8",
    "--n-samples-per-prompt": "8",
    "--rollout-max-context-len": "64",
    "--rollout-max-prompt-len": "32",
    "--eps-clip-c": "3",
    "--lr": "0.001",
    "--start-rollout-id": "2",
    "--min-lr": "0",
    "--tis-clip-low": "0.5",
    "--kl-coef": "0.1",
    "--actor-num-gpus-per-node": "4",
    "--micro-batch-size": "4",
    "--train-env-vars": '{"A": "b"}',
    "--tensor-model-parallel-size": "1",
    "--pipeline-model-parallel-size": "1",
    "--context-parallel-size": "1",
    "--expert-model-parallel-size": "1",
    "--expert-tensor-parallel-size": "1",
    "--actor-num-nodes": "1",
    "--rollout-num-gpus-per-engine": "1",
    "--rollout-external-engine-addrs": "127.0.0.1:30000",
    "--hidden-dropout": "0.0",
    "--attention-dropout": "0.0",
    "--num-layers": "2",
    "--hidden-size": "64",
    "--ffn-hidden-size": "128",
    "--num-attention-heads": "4",
    "--num-query-groups": "2",
    "--kv-channels": "32",
    "--vocab-size": "100",
    "--norm-epsilon": "1e-6",
    "--rotary-base": "10000",
    "--rotary-percent": "1.0",
    "--num-experts": "0",
    "--moe-router-topk": "0",
    "--moe-ffn-hidden-size": "0",
    "--moe-shared-expert-intermediate-size": "0",
    "--moe-layer-freq": "[1]*48",
    "--moe-router-score-function": "softmax",
    "--decoder-first-pipeline-num-layers": "1",
    "--decoder-last-pipeline-num-layers": "1",
    "--max-position-embeddings": "512",
}
COMPANIONS = {
    "--async-save": ("--save", "{new}"),
    "--save-interval": ("--save", "{new}"),
    "--save-hf": ("--save", "{new}"),
    "--save-trigger-sentinel": ("--save", "{new}"),
    "--eval-interval": ("--eval-prompt-data", "some", "{prompts}"),
    "--use-dynamic-batch-size": ("--max-tokens-per-gpu", "64"),
    "--mask-offpolicy-in-partial-rollout": ("--partial-rollout",),
    "--advantage-estimator": ("--normalize-advantages",),
    "--rollout-max-prompt-len": ("--rollout-max-context-len", "64"),
    "--recompute-granularity": ("--recompute-method", "uniform", "--recompute-num-layers", "1"),
    "--moe-enable-deepep": ("--moe-token-dispatcher-type", "flex"),
    "--decoder-first-pipeline-num-layers": ("--pipeline-model-parallel-size", "2"),
    "--decoder-last-pipeline-num-layers": ("--pipeline-model-parallel-size", "2"),
    "--rollout-external": ("--rollout-external-engine-addrs", "127.0.0.1:30000"),
    "--rollout-external-engine-addrs": ("--rollout-external",),
}
NEEDS_MORE = {
    "--use-wandb": "the package wandb",
    "--fully-async": "tests of its own",
    "--eval-config": "a YAML file; tests of its own",
    "--custom-config-path": "a YAML file; tests of its own",
    "--add-qkv-bias": "a Qwen2 checkpoint",
    "--untie-embeddings-and-output-weights": "an untied checkpoint",
    "--moe-router-pre-softmax": "a checkpoint with experts",
}


def _filled(value: str, command_line: CommandLine) -> str:
    names = {"prompts": command_line.prompts, "checkpoint": command_line.checkpoint, "new": command_line.directory}
    for name, path in names.items():
        value = value.replace("{" + name + "}", str(path))
    return value


def _sample(action: argparse.Action, flag: str) -> list[str]:
    if action.nargs == 0:
        return []
    if flag in SAMPLES:
        return [SAMPLES[flag]]
    if flag.endswith("-path") and "template" not in flag:
        return ["collections.OrderedDict"]
    if action.nargs == 2:
        return ["a", "b"]
    if action.choices:
        return [str(next(choice for choice in action.choices if choice != action.default))]
    return {int: ["7"], float: ["0.75"]}.get(action.type, ["text"])  # type: ignore[call-overload]


@pytest.mark.parametrize("flag", [flag for flag in ALL_FLAGS if flag not in REFUSED and flag not in NEEDS_MORE])
def test_each_declared_flag_parses(flag: str, actions: dict[str, argparse.Action], command_line: CommandLine):
    words = [flag, *_sample(actions[flag], flag), *COMPANIONS.get(flag, ())]
    if flag == "--num-epoch":
        words = [flag, "2"]
    if flag == "--advantage-estimator":
        words = [flag, "reinforce_plus_plus", "--normalize-advantages"]
    args = command_line.parse(*[_filled(word, command_line) for word in words])
    assert hasattr(args, actions[flag].dest)


@pytest.mark.parametrize("flag", [flag for flag in ALL_FLAGS if flag in REFUSED])
def test_each_refused_flag_says_why_and_what_instead(
    flag: str, actions: dict[str, argparse.Action], command_line: CommandLine
):
    _, refusal = REFUSED[flag]
    assert refusal.reason and refusal.instead
    with pytest.raises(ValueError) as error:
        command_line.parse(flag, *_sample(actions[flag], flag))
    assert flag in str(error.value)
    assert refusal.reason in str(error.value)
    assert refusal.instead in str(error.value)


@pytest.mark.parametrize("row", REFUSED_VALUES, ids=lambda row: row.flag)
def test_each_refused_value_says_why_and_what_instead(
    row: Any, actions: dict[str, argparse.Action], command_line: CommandLine
):
    action = actions[row.flag]
    candidates = [str(choice) for choice in action.choices] if action.choices else ["2"]
    refused = [text for text in candidates if not row.allows(action.type(text) if action.type else text)]
    assert refused, "the row refuses nothing"
    with pytest.raises(ValueError) as error:
        command_line.parse(row.flag, refused[0])
    assert all(part in str(error.value) for part in (row.flag, row.reason, row.instead))


def test_everything_that_is_refused_is_listed_at_once(command_line: CommandLine):
    with pytest.raises(ValueError) as error:
        command_line.parse("--use-opd", "--lora-rank", "8", "--train-backend", "fsdp")
    assert all(flag in str(error.value) for flag in ("--use-opd", "--lora-rank", "--train-backend fsdp"))


def test_a_refused_flag_at_its_default_is_accepted_and_stays_on_args(command_line: CommandLine):
    args = command_line.parse("--lora-rank", "0", "--object-store-backend", "ray")
    assert args.lora_rank == 0
    assert args.object_store_backend == "ray"
    assert args.use_opd is False
    assert args.colocate is False


def test_every_flag_has_a_help_line(actions: dict[str, argparse.Action]):
    assert [name for name, action in actions.items() if not action.help or len(action.help) < 10] == []


def test_none_is_explained_in_the_help_of_every_flag_without_a_default(actions: dict[str, argparse.Action]):
    unexplained = [
        name
        for name, action in actions.items()
        if action.nargs != 0
        and action.default is None
        and not action.required
        and name not in REFUSED
        and name != "--hf-checkpoint"
        and "None" not in (action.help or "")
    ]
    assert unexplained == []


def test_help_can_be_printed(parser: FlagParser):
    text = parser.format_help()
    assert "--max-weight-staleness" in text
    assert len(parser.format_usage().splitlines()) == 1


def test_no_flag_is_declared_twice():
    names: dict[str, str] = {}
    for module in flag_modules():
        parser = argparse.ArgumentParser(add_help=False)
        module.add_flags(parser)
        for action in parser._actions:
            for name in action.option_strings:
                assert name not in names, f"{name} is declared in {names[name]} and in {module.__name__}"
                names[name] = module.__name__
    assert not names.keys() & REFUSED.keys()


def test_what_has_no_effect_is_a_declared_flag(actions: dict[str, argparse.Action]):
    dests = {action.dest for action in actions.values()}
    for module in flag_modules():
        assert set(getattr(module, "NO_EFFECT", {})) <= dests
        assert set(getattr(module, "PLUGIN_PATHS", ())) <= dests


def test_every_accepted_flag_is_read_somewhere():
    """A flag that is accepted has an effect: its dest occurs in the code, outside the modules that declare flags."""
    sources = [*REPOSITORY.glob("miles/**/*.py"), *REPOSITORY.glob("train*.py")]
    words = {
        word for path in sources if "flags" not in path.name for word in re.findall(r"\w+", path.read_text("utf-8"))
    }
    read_here = {row.dest for row in REFUSED_VALUES} | {
        *("ci_test", "ci_disable_weight_update_checker"),  # read by `miles.ray.flags.resolve`
        "use_tensorboard",  # asks for what is always done
    }
    unread = []
    for module in flag_modules():
        if module.__name__.endswith(("model_shape_flags", "sglang_utils.flags")):
            continue  # compared with config.json; passed on to other programs
        parser = argparse.ArgumentParser(add_help=False)
        module.add_flags(parser)
        known = read_here | set(getattr(module, "NO_EFFECT", {}))
        unread += [action.dest for action in parser._actions if action.dest not in known | words]
    assert unread == []


def test_an_unknown_flag_gets_close_matches(command_line: CommandLine):
    with pytest.raises(ValueError, match="unknown flag --rollout-batchsize; did you mean --rollout-batch-size"):
        command_line.parse("--rollout-batchsize", "4")


def test_a_family_of_flags_is_refused_without_a_list_of_them(command_line: CommandLine):
    with pytest.raises(ValueError) as error:
        command_line.parse("--eval-sglang-mem-fraction-static", "0.5")
    assert str(error.value) == (
        "--eval-sglang-mem-fraction-static is not available: engines that only evaluate (--eval-num-gpus) are started "
        "with the flags of the engines that generate. Instead: set --sglang-*, which holds for both."
    )


@pytest.mark.parametrize(
    ("unknown", "hint"),
    [
        ("--lr-rate", "did you mean --lr?"),
        ("--rollout-batch", "did you mean --rollout-batch-size?"),
        ("--colocat", "see --help for the flags that exist"),  # --colocate is known, but not available
        ("--sglang-foo", "see --help for the flags that exist"),
    ],
)
def test_what_is_suggested_for_an_unknown_flag(unknown: str, hint: str, command_line: CommandLine):
    with pytest.raises(ValueError) as error:
        command_line.parse(unknown, "1")
    assert str(error.value) == f"unknown flag {unknown}; {hint}"


def test_a_missing_flag_is_called_required_once(command_line: CommandLine):
    with pytest.raises(ValueError) as error:
        command_line.parse(without=("--rollout-batch-size",))
    assert str(error.value) == "--rollout-batch-size is required: Prompts of one rollout"


def test_every_unknown_and_missing_flag_is_named(command_line: CommandLine):
    with pytest.raises(ValueError) as error:
        command_line.parse("--quux", "4", "--foobar=3", without=("--rollout-batch-size",))
    lines = str(error.value).splitlines()
    assert [line.split(";")[0].split(":")[0] for line in lines] == [
        "unknown flag --quux",
        "unknown flag --foobar",
        "--rollout-batch-size is required",
    ]


def test_values_without_a_flag_are_named(command_line: CommandLine):
    with pytest.raises(ValueError, match="these values belong to no flag: stray"):
        command_line.parse("stray")


def test_a_flag_is_not_abbreviated(command_line: CommandLine):
    with pytest.raises(ValueError, match="unknown flag --rollout-batch"):
        command_line.parse("--rollout-batch", "4")


def test_a_malformed_value_names_the_flag(command_line: CommandLine):
    with pytest.raises(ValueError, match=r"--n-samples-per-prompt.*'four'"):
        command_line.parse("--n-samples-per-prompt", "four")
