"""Updates through files with real engine processes."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from miles.backends.megatron_utils.engine_client import WeightUpdateError
from miles.backends.megatron_utils.updaters import make_updater
from miles.backends.megatron_utils.weight_update import WeightUpdateConfig
from tests.fast.backends.megatron_utils.test_weight_update_engine import call, process, process_with_pid
from tests.fast.backends.megatron_utils.tiny_models import make_args, make_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ENGINE = ("miles.backends.embedded_engine", "--port", "PORT", "--model-path")
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Iterator[str]:
    with process(*ENGINE, str(checkpoints["qwen3-tied"])) as url:
        yield url


@pytest.fixture
def trainer(checkpoints: dict[str, Path], trainer_of: Callable[..., Any], tmp_path: Path) -> Any:
    return trainer_of(
        make_args(
            checkpoints["qwen3-tied"],
            check_weight_update_equal=True,
            rollout_engine="embedded",
            update_weight_transfer_mode="disk-delta",
            update_weight_disk_dir=str(tmp_path / "versions"),
            update_weight_timeout_secs=4.0,
        )
    )


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_engine_and_trainer_hold_the_same_weights(engine: str, trainer: Any, tmp_path: Path, mode: str) -> None:
    from dataclasses import replace

    trainer._update_config = replace(trainer._update_config, pause_mode=mode)
    trainer.connect_engines([engine])
    for step in range(3):
        trainer.train(step, make_shard(seed=step))
        times = trainer.update_weights()
        assert call(engine, "/model_info")["weight_version"] == str(step + 1)
        assert call(engine, "/model_info")["model_path"] == str(tmp_path / "versions" / f"version-{step + 1:08d}")
        found = call(engine, "/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
        assert found == trainer.weight_checksums()
        assert times["perf/weight_update_pause_seconds"] >= times["perf/weight_update_transfer_seconds"] > 0
    answer = call(engine, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})
    assert answer["meta_info"]["weight_version"] == "3"
    kept = sorted(path.name for path in (tmp_path / "versions").iterdir())
    assert kept == ["version-00000002", "version-00000003"]


def test_an_engine_that_hangs_is_named_and_the_rest_is_updated_under_the_same_version(
    engine: str, trainer: Any, checkpoints: dict[str, Path]
) -> None:
    with process_with_pid(*ENGINE, str(checkpoints["qwen3-tied"])) as (url, pid):
        trainer.connect_engines([url, engine])
        trainer.train(0, make_shard(seed=0))
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(WeightUpdateError) as error:
            trainer.update_weights()
        assert error.value.engine_urls == (url,) and time.monotonic() - start < 20
        assert trainer.weight_version == 0
        trainer.connect_engines([engine])
        trainer.update_weights()
    answer = call(engine, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})
    assert answer["meta_info"]["weight_version"] == "1"


def test_a_crash_while_writing_leaves_engines_running_and_the_former_version_loadable(
    engine: str, trainer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer.connect_engines([engine])
    trainer.update_weights()
    before = call(engine, "/weights_checker", {"action": "checksum"})

    def broken() -> Iterator[Any]:
        yield [next(iter(trainer.hf_named_tensors()))]
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "_gathered_weights", broken)
        with pytest.raises(OSError, match="No space left"):
            trainer.update_weights()
    answer = call(engine, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})
    assert answer["meta_info"]["weight_version"] == "1", "it was not even paused"
    loaded = call(engine, "/update_weights_from_disk", {"model_path": str(tmp_path / "versions" / "version-00000001")})
    assert loaded["success"] and call(engine, "/weights_checker", {"action": "checksum"}) == before


def test_the_mode_needs_a_directory() -> None:
    from argparse import Namespace

    with pytest.raises(ValueError, match="--update-weight-disk-dir"):
        WeightUpdateConfig.from_args(Namespace(update_weight_transfer_mode="disk-delta"))
    config = WeightUpdateConfig.from_args(
        Namespace(update_weight_transfer_mode="disk-delta", update_weight_disk_dir="versions")
    )
    with pytest.raises(ValueError, match="no engines"):
        make_updater(config).connect([])
