from __future__ import annotations

import pytest

from miles.backends.embedded_engine.config import EngineConfig, parse_config


def test_the_command_line_sets_every_field() -> None:
    assert parse_config(["--model-path", "m"]) == EngineConfig("m")
    argv = "--model-path m --host 0.0.0.0 --port 7 --dtype bfloat16 --device cpu --max-running-requests 3"
    argv += " --context-length 99 --weight-version 4 --random-seed 5 --log-level debug --max-total-tokens 400"
    config = parse_config(argv.split())
    assert (config.host, config.port, config.dtype, config.device) == ("0.0.0.0", 7, "bfloat16", "cpu")
    assert (config.max_running_requests, config.context_length, config.max_total_tokens) == (3, 99, 400)
    assert (config.weight_version, config.random_seed, config.log_level) == ("4", 5, "debug")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "--model-path"),
        ("--model-path m --max-running-requests 0", "--max-running-requests must be at least 1, got 0"),
        ("--model-path m --context-length 1", "--context-length must be at least 2, got 1"),
        ("--model-path m --dtype int8", "--dtype"),
    ],
)
def test_mistakes_name_the_flag(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(argv.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
