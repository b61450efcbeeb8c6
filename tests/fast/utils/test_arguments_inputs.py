"""Files, plug-ins, ports and configuration files that a command line names; what --check-config prints."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from miles.backends.sglang_utils.flags import router_command_flags
from miles.utils.tracking_flags import make_run_dir, new_run_dir
from tests.fast.utils.command_lines import HF_CONFIG

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from tests.fast.utils.command_lines import CommandLine


def refused(command_line: CommandLine, *flags: str, without: tuple[str, ...] = ()) -> str:
    """The message with which the command line is refused."""
    with pytest.raises(ValueError) as error:
        command_line.parse(*flags, without=without)
    return str(error.value)


class TestCheckpoint:
    def test_is_required(self, command_line: CommandLine):
        assert "--hf-checkpoint is required" in refused(command_line, without=("--hf-checkpoint",))

    def test_must_be_a_directory(self, command_line: CommandLine):
        message = refused(command_line, "--hf-checkpoint", "Qwen/Qwen3-4B")
        assert "--hf-checkpoint: 'Qwen/Qwen3-4B' is not a directory" in message
        assert "hf download" in message

    def test_needs_a_config(self, command_line: CommandLine):
        (command_line.checkpoint / "config.json").unlink()
        assert "has no config.json" in refused(command_line)

    def test_needs_a_readable_config(self, command_line: CommandLine):
        (command_line.checkpoint / "config.json").write_text("{")
        assert "is not valid JSON" in refused(command_line)

    def test_needs_a_tokenizer(self, command_line: CommandLine):
        (command_line.checkpoint / "tokenizer.json").unlink()
        assert "has no tokenizer (none of tokenizer.json" in refused(command_line)

    def test_needs_weights(self, command_line: CommandLine):
        (command_line.checkpoint / "model.safetensors").unlink()
        message = refused(command_line, "--check-config")
        assert message.startswith("--hf-checkpoint: ")
        assert "has no model.safetensors and no model.safetensors.index.json" in message

    def test_needs_whole_weights(self, command_line: CommandLine):
        (command_line.checkpoint / "model.safetensors").write_bytes(b"")
        assert "is not a safetensors file, or was cut off (0 bytes)" in refused(command_line)

    def test_must_be_a_model_that_can_be_built(self, command_line: CommandLine):
        (command_line.checkpoint / "config.json").write_text(json.dumps({**HF_CONFIG, "model_type": "mixtral"}))
        assert "'mixtral' is not supported; supported: qwen3" in refused(command_line)

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (["--num-layers", "3"], 2),
            (["--hidden-size", "65"], 64),
            (["--ffn-hidden-size", "64"], 128),
            (["--num-attention-heads", "2"], 4),
            (["--num-query-groups", "4"], 2),
            (["--kv-channels", "16"], 32),
            (["--vocab-size", "128"], 100),
            (["--norm-epsilon", "1e-5"], 1e-06),
            (["--rotary-base", "1000000"], 10000.0),
            (["--max-position-embeddings", "1024"], 512),
            (["--rotary-percent", "0.5"], 1.0),
            (["--untie-embeddings-and-output-weights"], False),
            (["--add-qkv-bias"], False),
            (["--normalization", "LayerNorm"], "RMSNorm"),
            (["--position-embedding-type", "learned_absolute"], "rope"),
            (["--num-experts", "8"], 0),
            (["--moe-router-score-function", "sigmoid"], "softmax"),
        ],
    )
    def test_decides_the_shape(self, flags: list[str], says: object, command_line: CommandLine):
        message = refused(command_line, *flags)
        assert f"{' '.join(flags[:1])}" in message
        assert flags[-1].split("e-")[0] in message
        assert f"config.json, which says {says}" in message

    def test_flags_that_agree_are_accepted(self, command_line: CommandLine):
        args = command_line.parse(
            *("--num-layers", "2", "--norm-epsilon", "1e-6", "--rotary-base", "10000", "--group-query-attention"),
            *("--swiglu", "--qk-layernorm", "--disable-bias-linear", "--normalization", "RMSNorm"),
        )
        assert args.num_layers == 2

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--rollout-max-context-len", "513"], "is longer than the model's context of 512 tokens"),
            (["--rollout-max-prompt-len", "512"], "leaves no room for a response in the model's context of 512"),
            (["--rollout-max-response-len", "512"], "leaves no room for a prompt in the model's context of 512"),
            (["--eval-max-response-len", "600"], "leaves no room for a prompt in the model's context of 512"),
            (["--eval-max-context-len", "513"], "is longer than the model's context of 512 tokens"),
            (
                ["--rollout-max-context-len", "64", "--rollout-max-prompt-len", "64"],
                "--rollout-max-prompt-len (64) must be less than --rollout-max-context-len (64)",
            ),
        ],
    )
    def test_bounds_the_context(self, flags: list[str], message: str, command_line: CommandLine):
        assert message in refused(command_line, *flags)


class TestPrompts:
    def test_are_required(self, command_line: CommandLine):
        assert "--prompt-data is required" in refused(command_line, without=("--prompt-data",))
        command_line.parse("--disable-rollout-global-dataset", without=("--prompt-data",))

    def test_must_exist(self, command_line: CommandLine):
        assert "--prompt-data: the data file 'none.jsonl' does not exist" in refused(
            command_line, "--prompt-data", "none.jsonl"
        )

    def test_may_be_a_slice(self, command_line: CommandLine):
        args = command_line.parse("--prompt-data", f"{command_line.prompts}@[0:1]")
        assert args.prompt_data.endswith("@[0:1]")

    def test_must_have_a_known_format(self, command_line: CommandLine):
        path = command_line.directory / "prompts.csv"
        path.write_text("")
        assert "unknown format; known: .jsonl, .parquet" in refused(command_line, "--prompt-data", str(path))

    def test_evaluation_data_must_exist(self, command_line: CommandLine):
        message = refused(command_line, "--eval-interval", "1", "--eval-prompt-data", "aime", "none.jsonl")
        assert "evaluation data set aime: the data file 'none.jsonl' does not exist" in message

    def test_evaluation_needs_data(self, command_line: CommandLine):
        assert "--eval-interval needs something to evaluate" in refused(command_line, "--eval-interval", "1")

    def test_evaluation_data_comes_in_pairs(self, command_line: CommandLine):
        path = str(command_line.prompts)
        assert "--eval-prompt-data" in refused(command_line, "--eval-prompt-data", "a", path, "b")

    def test_evaluation_excludes_group_rewards(self, command_line: CommandLine):
        path = str(command_line.prompts)
        flags = ("--group-rm", "--eval-interval", "1", "--eval-prompt-data", "a", path)
        assert "--group-rm does not go together with --eval-interval" in refused(command_line, *flags)

    def test_evaluation_data_sets_are_resolved(self, command_line: CommandLine):
        path = str(command_line.prompts)
        args = command_line.parse("--eval-interval", "1", "--eval-prompt-data", "a", path, "--eval-temperature", "0")
        assert [(dataset.name, dataset.path, dataset.temperature) for dataset in args.eval_datasets] == [
            ("a", path, 0.0)
        ]

    def test_evaluation_can_come_from_a_file(self, command_line: CommandLine):
        config = command_line.directory / "eval.yaml"
        entry = {"name": "a", "path": str(command_line.prompts)}
        config.write_text(yaml.safe_dump({"eval": {"defaults": {"top_k": 5}, "datasets": [entry]}}))
        args = command_line.parse("--eval-interval", "1", "--eval-config", str(config))
        assert [(dataset.name, dataset.top_k) for dataset in args.eval_datasets] == [("a", 5)]


class TestPlugins:
    FLAGS = (
        "--rollout-function-path",
        "--eval-function-path",
        "--custom-generate-function-path",
        "--custom-rm-path",
        "--dynamic-sampling-filter-path",
        "--rollout-sample-filter-path",
        "--buffer-filter-path",
        "--data-source-path",
        "--custom-loss-function-path",
        "--custom-tis-function-path",
        "--custom-pg-loss-reducer-function-path",
        "--custom-reward-post-process-path",
        "--custom-convert-samples-to-train-data-path",
        "--custom-megatron-init-path",
    )

    @pytest.fixture
    def plugin(self, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A module `plugin_of_user` that can be imported; the test writes it."""
        monkeypatch.syspath_prepend(str(command_line.directory))
        monkeypatch.delitem(sys.modules, "plugin_of_user", raising=False)
        return command_line.directory / "plugin_of_user.py"

    @pytest.mark.parametrize("flag", FLAGS)
    def test_a_missing_attribute_names_flag_path_and_what_exists(
        self, flag: str, plugin: Path, command_line: CommandLine
    ):
        plugin.write_text("def reward(args, sample): return 1.0\n")
        message = refused(command_line, flag, "plugin_of_user.rewrad")
        assert all(part in message for part in (flag, "plugin_of_user.rewrad", "it has reward"))

    def test_a_missing_module_names_the_flag(self, command_line: CommandLine):
        message = refused(command_line, "--custom-rm-path", "no_such_module.reward")
        assert message.startswith("--custom-rm-path: 'no_such_module.reward': there is no module 'no_such_module'")

    def test_a_path_without_a_module_names_the_flag(self, command_line: CommandLine):
        assert "--custom-rm-path: 'reward' is not a dotted path" in refused(command_line, "--custom-rm-path", "reward")

    def test_an_error_inside_the_module_is_shown(self, plugin: Path, command_line: CommandLine):
        plugin.write_text("raise RuntimeError('no data here')\n")
        message = refused(command_line, "--custom-rm-path", "plugin_of_user.reward")
        assert message == "--custom-rm-path 'plugin_of_user.reward': importing it raised RuntimeError: no data here"

    def test_what_cannot_be_called_is_refused(self, plugin: Path, command_line: CommandLine):
        plugin.write_text("reward = 3\n")
        message = refused(command_line, "--custom-rm-path", "plugin_of_user.reward")
        assert message == "--custom-rm-path 'plugin_of_user.reward' names a int, not a function or class"

    @pytest.mark.parametrize("flag", ["--custom-generate-function-path", "--rollout-function-path"])
    def test_a_function_may_declare_flags(self, flag: str, plugin: Path, command_line: CommandLine):
        plugin.write_text(
            "async def generate(args, sample, sampling_params): return sample\n"
            "def add_arguments(parser):\n"
            "    parser.add_argument('--search-url', default='http://localhost')\n"
            "    parser.add_argument('--generate-max-turns', type=int, default=4)\n"
            "generate.add_arguments = add_arguments\n"
        )
        args = command_line.parse(
            flag, "plugin_of_user.generate", "--search-url", "http://x", "--generate-max-turns", "9"
        )
        assert args.search_url == "http://x"
        assert args.generate_max_turns == 9, "a plug-in's own flag replaces one that is only known"
        assert command_line.parse(f"{flag}=plugin_of_user.generate").search_url == "http://localhost"

    def test_a_flag_of_miles_cannot_be_declared_again(self, plugin: Path, command_line: CommandLine):
        plugin.write_text(
            "def generate(args, sample, sampling_params): ...\n"
            "generate.add_arguments = lambda parser: parser.add_argument('--lr', type=float)\n"
        )
        message = refused(command_line, "--custom-generate-function-path", "plugin_of_user.generate")
        assert "plugin_of_user.generate declares a flag that exists already" in message
        assert "--lr" in message

    def test_a_driver_may_declare_flags(self, command_line: CommandLine):
        def add(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--mine", type=int, default=1)

        assert command_line.parse("--mine", "2", add_custom_arguments=add).mine == 2

    def test_an_unknown_reward_type_lists_the_known_ones(self, command_line: CommandLine):
        message = refused(command_line, "--rm-type", "mathematics")
        assert "'mathematics'" in message
        assert "deepscaler" in message and "math" in message

    def test_a_boxed_reward_type_is_known(self, command_line: CommandLine):
        assert command_line.parse("--rm-type", "boxed_math").rm_type == "boxed_math"


class TestPorts:
    def test_a_port_in_use_is_refused(self, command_line: CommandLine):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            for flag in ("--sglang-router-port", "--router-prometheus-port"):
                assert f"{flag} {port}: the port is in use on 127.0.0.1" in refused(command_line, flag, port)

    def test_a_number_that_is_no_port_is_refused(self, command_line: CommandLine):
        assert "must be a port from 1 to 65535, got 70000" in refused(command_line, "--sglang-router-port", "70000")

    def test_the_router_listens_on_this_machine(self, command_line: CommandLine):
        message = refused(command_line, "--sglang-router-ip", "192.0.2.1")
        assert message.startswith("--sglang-router-ip 192.0.2.1: not an address of this machine")
        assert command_line.parse("--sglang-router-ip", "127.0.0.1").sglang_router_ip == "127.0.0.1"

    def test_router_flags_become_its_command_line(self, command_line: CommandLine):
        args = command_line.parse(
            *("--router-health-check-interval-secs", "3", "--router-disable-health-check"),
            *("--router-request-id-headers", "x-a", "x-b"),
        )
        words = router_command_flags(args)
        assert words == [
            *("--request-id-headers", "x-a", "x-b"),
            *("--health-check-interval-secs", "3"),
            "--disable-health-check",
        ]
        assert router_command_flags(command_line.parse()) == []


class TestConfigFile:
    def write(self, command_line: CommandLine, text: str) -> tuple[str, str]:
        path = command_line.directory / "config.yaml"
        path.write_text(text)
        return "--custom-config-path", str(path)

    def test_sets_values_over_the_command_line(self, command_line: CommandLine):
        flags = self.write(command_line, "lr: 1e-3\nn-samples-per-prompt: 8\nmax_turns: 5\nnested: {a: [1, 2]}\n")
        args = command_line.parse(*flags, "--lr", "0.5")
        assert args.lr == 1e-3
        assert args.n_samples_per_prompt == 8
        assert args.global_batch_size == 32, "rules see the values of the file"
        assert args.max_turns == 5
        assert args.nested == {"a": [1, 2]}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("rollout_batch_size: many", "rollout_batch_size (--rollout-batch-size) must be an integer, got 'many'"),
            ("rollout_batch_size: 1.5", "must be an integer, got 1.5"),
            ("rollout_batch_size: true", "must be an integer, got True"),
            ("rollout_batch_size:", "must be an integer, got None"),
            ("lr: fast", "lr (--lr) must be a number, got 'fast'"),
            ("lr: .inf", "--lr must be a finite number, got inf"),
            ("use_tis: 1", "use_tis (--use-tis) must be true or false, got 1"),
            ("rollout_stop: end", "rollout_stop (--rollout-stop) must be a list, got 'end'"),
            ("rollout_stop: [1]", "must be text, got 1"),
            ("kl_loss_type: k9", "must be one of k1, k2, k3, low_var_kl, got 'k9'"),
            ("- a\n- b", "must be a mapping of names to values"),
            ("a: [", "is not valid YAML"),
            ("use_opd: true", "--use-opd is not available"),
            ("train_backend: fsdp", "--train-backend fsdp is not available"),
        ],
    )
    def test_is_checked(self, text: str, message: str, command_line: CommandLine):
        assert message in refused(command_line, *self.write(command_line, text))

    def test_may_be_empty(self, command_line: CommandLine):
        assert command_line.parse(*self.write(command_line, "")).num_rollout == 3

    def test_must_exist(self, command_line: CommandLine):
        assert "--custom-config-path: the configuration file 'no.yaml' does not exist" in refused(
            command_line, "--custom-config-path", "no.yaml"
        )


class TestCheckConfig:
    def printed(self, command_line: CommandLine, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
        with pytest.raises(SystemExit) as end:
            command_line.parse(*flags)
        assert end.value.code == 0
        return capsys.readouterr().out

    def test_prints_the_resolved_configuration_and_exits(
        self, command_line: CommandLine, capsys: pytest.CaptureFixture[str]
    ):
        out = self.printed(command_line, capsys, "--check-config", "--fully-async", "--lr", "1e-6")
        config = yaml.safe_load(out)
        assert list(config) == sorted(config)
        assert config["global_batch_size"] == 16
        assert config["rollout_function_path"].endswith("FullyAsyncRolloutFn")
        assert config["lr"] == 1e-6, "given, although it is the default"
        assert out.splitlines()[-1] == "# OK: a run would start"

    def test_leaves_out_what_has_its_default(self, command_line: CommandLine, capsys: pytest.CaptureFixture[str]):
        config = yaml.safe_load(self.printed(command_line, capsys, "--check-config"))
        assert len(config) < 30
        assert {"run_dir", "check_config", "sglang_mem_fraction_static", "lora_rank"} & set(config) == set()

    def test_prints_everything_on_demand(self, command_line: CommandLine, capsys: pytest.CaptureFixture[str]):
        out = self.printed(command_line, capsys, "--check-config", "all")
        assert {"run_dir", "sglang_mem_fraction_static", "lora_rank"} <= set(yaml.safe_load(out))
        assert out.splitlines()[-1] == "# OK: a run would start"

    def test_keeps_secrets(self, command_line: CommandLine, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit):
            command_line.parse("--check-config", "--wandb-key", "sesame")
        assert "sesame" not in capsys.readouterr().out

    def test_refuses_what_a_run_refuses(self, command_line: CommandLine):
        assert "do not divide" in refused(command_line, "--check-config", "--global-batch-size", "6")

    def test_starts_nothing_heavy(self, command_line: CommandLine):
        code = (
            "import sys; from miles.utils.arguments import parse_args\n"
            "args = parse_args(argv=sys.argv[1:])\n"
            "heavy = {'torch', 'ray', 'transformers', 'megatron', 'sglang', 'numpy'} & set(sys.modules)\n"
            "assert not heavy, heavy"
        )
        path = str(command_line.prompts)
        argv = command_line.argv("--eval-interval", "1", "--eval-prompt-data", "a", path, "--embedded-device", "cpu")
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_a_run_directory_is_never_used_twice(tmp_path: Path):
    from datetime import datetime

    now = datetime(2026, 11, 29, 18, 5, 7)
    names = []
    for _ in range(3):
        expected = new_run_dir(str(tmp_path), now)
        path = make_run_dir(str(tmp_path), now)
        assert path == expected
        names.append(path.rsplit("/", 1)[1])
    assert names == ["20261129-180507", "20261129-180507-1", "20261129-180507-2"]


def test_a_run_directory_that_cannot_be_made_names_the_flag(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--runs-dir .*: cannot make"):
        make_run_dir(str(tmp_path / "file" / "runs"))
