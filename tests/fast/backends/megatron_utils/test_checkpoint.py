"""Save, resume, and what happens to checkpoints that are not whole."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from miles.backends.megatron_utils.checkpoint import POINTER, verify
from miles.utils import checkpoint_set
from tests.fast.backends.megatron_utils.tiny_models import make_args, make_shard

if TYPE_CHECKING:
    from collections.abc import Callable

    TrainerOf = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

SCHEDULE = {"lr": 3e-3, "lr_warmup_iters": 2, "lr_decay_style": "cosine", "micro_batch_size": 3}


def run(trainer: Any, rollouts: range) -> list[dict[str, float]]:
    return [trainer.train(i, make_shard(seed=i)) for i in rollouts]


def saved_run(checkpoint: Path, save: Path, trainer_of: TrainerOf, rollouts: int = 3, **overrides: Any) -> Any:
    """Train `rollouts` rollouts and save after each."""
    trainer = trainer_of(make_args(checkpoint, save=str(save), **{**SCHEDULE, **overrides}))
    for i in range(rollouts):
        trainer.train(i, make_shard(seed=i))
        trainer.weight_version = i + 1
        trainer.save(i)
    return trainer


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("qwen3-tied", {}),
        ("qwen2-untied", {}),
        ("qwen3-tied", {"optimizer": "sgd"}),
        ("qwen3-tied", {"bf16": True}),
        ("qwen3-tied", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    ],
    ids=["tied", "untied", "sgd", "bf16", "dropout"],
)
def test_resumed_run_equals_the_uninterrupted_one(
    name: str, overrides: dict[str, Any], checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path
) -> None:
    args = make_args(checkpoints[name], save=str(tmp_path), load=str(tmp_path), **SCHEDULE, **overrides)
    trainer = trainer_of(args)
    assert trainer.load() == 0
    run(trainer, range(3))
    trainer.weight_version = 7
    trainer.save(2)
    uninterrupted = run(trainer, range(3, 6))
    expected = {n: t.clone() for n, t in trainer.hf_named_tensors()}
    random_state = torch.get_rng_state()

    resumed = trainer_of(args)
    torch.manual_seed(99)
    assert resumed.load() == 3 and resumed.weight_version == 7
    again = run(resumed, range(3, 6))
    assert torch.equal(torch.get_rng_state(), random_state)
    for a, b in zip(uninterrupted, again, strict=True):
        for key in ("train/loss", "train/grad_norm", "train/lr-pg_0", "train/step", "rollout/log_probs"):
            assert b[key] == pytest.approx(a[key], abs=1e-6), key
    for key, tensor in resumed.hf_named_tensors():
        torch.testing.assert_close(tensor, expected[key], atol=1e-6, rtol=0)


def test_every_parameter_has_a_step_counter_of_its_own(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path
) -> None:
    """A counter shared by all would be incremented once per parameter, and the run would silently diverge."""
    saved_run(checkpoints["qwen3-tied"], tmp_path, trainer_of, rollouts=2)
    resumed = trainer_of(make_args(checkpoints["qwen3-tied"], load=str(tmp_path), **SCHEDULE))
    resumed.load()
    steps = [state["step"] for state in resumed._optimizer.optimizer.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps) > 1
    assert {float(step) for step in steps} == {2.0}


def test_nothing_in_a_checkpoint_is_pickled(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path
) -> None:
    trainer = saved_run(checkpoints["qwen3-tied"], tmp_path, trainer_of, rollouts=1)
    directory = tmp_path / "iter_0000000"
    assert {path.suffix for path in directory.iterdir()} == {".safetensors", ".json"}
    assert (tmp_path / POINTER).read_text(encoding="utf-8").strip() == "0"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000000", POINTER], "no temporary files stay behind"
    assert verify(directory) is None
    del trainer


def test_a_set_takes_the_rollout_part_and_remembers_which_runs_it_is_made_of(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path
) -> None:
    save = tmp_path / "checkpoints"
    first = saved_run(checkpoints["qwen3-tied"], save, trainer_of, rollouts=2, run_dir="runs/first")
    first.train(2, make_shard(seed=2))
    staged = checkpoint_set.staged_rollout_path(save, 2)
    staged.write_text('{"queued": []}', encoding="utf-8")
    first.save(2, str(staged))
    newest = checkpoint_set.newest_readable(save)
    assert newest is not None
    assert (newest / "rollout/state.json").read_text(encoding="utf-8") == '{"queued": []}' and not staged.exists()
    first.train(3, make_shard(seed=3))  # never saved

    second = trainer_of(make_args(checkpoints["qwen3-tied"], save=str(save), run_dir="runs/second", **SCHEDULE))
    assert second.load(str(newest)) == 3
    for i in (3, 4):
        second.train(i, make_shard(seed=i))
    assert checkpoint_set.read_record(Path(second.save(4)))["lineage"] == [
        {"run": "first", "first": 0, "last": 2},
        {"run": "second", "first": 3, "last": 4},
    ]


def test_a_set_of_the_first_format_is_read(checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path) -> None:
    saved_run(checkpoints["qwen3-tied"], tmp_path, trainer_of, rollouts=1)
    state = tmp_path / "iter_0000000" / "state.json"
    record = json.loads(state.read_text(encoding="utf-8"))
    del record["lineage"], record["files"]["model.safetensors.index.json"]
    (state.parent / "model.safetensors.index.json").unlink()
    state.write_text(json.dumps({**record, "format": 1}), encoding="utf-8")
    assert trainer_of(make_args(checkpoints["qwen3-tied"], load=str(tmp_path), **SCHEDULE)).load() == 1


@pytest.mark.parametrize(("saved", "wanted"), [("sgd", "adam"), ("adam", "sgd")])
def test_the_state_of_another_optimizer_is_refused_unless_it_is_reset(
    saved: str, wanted: str, checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path
) -> None:
    first = trainer_of(make_args(checkpoints["qwen3-tied"], save=str(tmp_path), optimizer=saved, **SCHEDULE))
    first.train(0, make_shard(seed=0))
    first.save(0)
    flags = {**SCHEDULE, "load": str(tmp_path), "optimizer": wanted}
    second = trainer_of(make_args(checkpoints["qwen3-tied"], **flags))
    with pytest.raises(
        ValueError, match=f"has the state of --optimizer {saved}, and this run has --optimizer {wanted}"
    ):
        second.load()
    third = trainer_of(make_args(checkpoints["qwen3-tied"], **flags, reset_optimizer_states=True))
    assert third.load() == 1
    third.train(1, make_shard(seed=1))


def test_a_set_that_is_saved_again_is_replaced(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path
) -> None:
    trainer = saved_run(checkpoints["qwen3-tied"], tmp_path, trainer_of, rollouts=1)
    trainer.weight_version = 5
    trainer.save(0)
    assert checkpoint_set.read_record(tmp_path / "iter_0000000")["weight_version"] == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000000", POINTER]


def damage_truncate(directory: Path) -> None:
    file = directory / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damage_flip(directory: Path) -> None:
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def damage_remove(directory: Path) -> None:
    (directory / "rng.safetensors").unlink()


def damage_no_state(directory: Path) -> None:
    (directory / "state.json").unlink()


def damage_format(directory: Path) -> None:
    record = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    (directory / "state.json").write_text(json.dumps({**record, "format": 99}), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_truncate, "optimizer.safetensors has"),
        (damage_flip, "model.safetensors is damaged"),
        (damage_remove, "rng.safetensors is missing"),
        (damage_no_state, "state.json cannot be read"),
        (damage_format, "format 99"),
    ],
)
def test_a_broken_checkpoint_is_refused_and_the_one_before_it_is_used(
    damage: Callable[[Path], None],
    reason: str,
    checkpoints: dict[str, Path],
    trainer_of: TrainerOf,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved_run(checkpoints["qwen3-tied"], tmp_path, trainer_of, rollouts=2)
    damage(tmp_path / "iter_0000001")
    trainer = trainer_of(make_args(checkpoints["qwen3-tied"], load=str(tmp_path), **SCHEDULE))
    with caplog.at_level(logging.WARNING):
        assert trainer.load() == 1 and trainer.weight_version == 1
    assert "iter_0000001 is refused" in caplog.text and reason in caplog.text
    damage(tmp_path / "iter_0000000")
    with pytest.raises(ValueError, match=r"no checkpoint there is readable.*iter_0000001.*iter_0000000"):
        trainer.load()


def test_a_run_killed_before_the_pointer_was_written_resumes_from_the_checkpoint_that_it_names(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path
) -> None:
    saved_run(checkpoints["qwen3-tied"], tmp_path, trainer_of, rollouts=2)
    (tmp_path / ".part-iter_0000002-1").mkdir()
    (tmp_path / POINTER).write_text("0\n", encoding="utf-8")
    trainer = trainer_of(make_args(checkpoints["qwen3-tied"], load=str(tmp_path), **SCHEDULE))
    assert trainer.load() == 1


def test_a_failed_save_leaves_the_old_checkpoint_alone(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles.backends.megatron_utils import checkpoint

    trainer = saved_run(checkpoints["qwen3-tied"], tmp_path, trainer_of, rollouts=1)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "write_file", full)
    with pytest.raises(OSError, match="no space"):
        trainer.save(1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000000", POINTER]
    assert verify(tmp_path / "iter_0000000") is None


def test_a_checkpoint_without_optimizer_state_starts_with_fresh_moments(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path
) -> None:
    saved_run(checkpoints["qwen3-tied"], tmp_path, trainer_of, rollouts=1, no_save_optim=True)
    assert not (tmp_path / "iter_0000000" / "optimizer.safetensors").exists()
    trainer = trainer_of(make_args(checkpoints["qwen3-tied"], load=str(tmp_path), **SCHEDULE))
    assert trainer.load() == 1
    assert not trainer._optimizer.optimizer.state and trainer._scheduler.num_steps == 0


def test_load_takes_a_hugging_face_checkpoint_too(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path
) -> None:
    from tests.fast.backends.megatron_utils.tiny_models import write_checkpoint

    other = write_checkpoint(tmp_path / "other", "qwen3-tied", seed=5)
    expected = {name: tensor.clone() for name, tensor in trainer_of(make_args(other)).hf_named_tensors()}
    trainer = trainer_of(make_args(checkpoints["qwen3-tied"], load=str(other)))
    assert trainer.load() == 0
    assert all(torch.equal(tensor, expected[name]) for name, tensor in trainer.hf_named_tensors())


def test_a_checkpoint_serves_as_reference_model(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path
) -> None:
    """`--ref-load` takes a directory of checkpoints; the newest one is a Hugging Face checkpoint, too."""
    saved_run(checkpoints["qwen3-tied"], tmp_path, trainer_of, rollouts=2)
    args = make_args(checkpoints["qwen3-tied"], use_kl_loss=True, kl_loss_type="k3", ref_load=str(tmp_path))
    assert trainer_of(args).train(0, make_shard(seed=0))["train/kl_loss"] > 0
    with pytest.raises(ValueError, match=r"no config\.json"):
        trainer_of(make_args(checkpoints["qwen3-tied"], use_kl_loss=True, ref_load=str(tmp_path / "nowhere")))


def test_a_set_is_written_beside_the_training_and_holds_the_state_of_its_moment(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles.backends.megatron_utils import checkpoint

    may_write = threading.Event()
    write_part = checkpoint.write_part

    def held_back(*call: Any) -> None:
        assert may_write.wait(30)
        write_part(*call)

    monkeypatch.setattr(checkpoint, "write_part", held_back)
    args = make_args(checkpoints["qwen3-tied"], save=str(tmp_path), async_save=True, **SCHEDULE)
    trainer = trainer_of(args)
    run(trainer, range(2))
    expected = {n: t.clone() for n, t in trainer.hf_named_tensors()}
    path = Path(trainer.save(1))
    later = run(trainer, range(2, 4))  # the weights move on while the set is not on disk yet
    assert not path.exists() and checkpoint_set.newest_readable(tmp_path) is None
    may_write.set()
    trainer.finish_saving()
    assert verify(path) is None and (tmp_path / POINTER).read_text(encoding="utf-8").strip() == "1"

    resumed = trainer_of(make_args(checkpoints["qwen3-tied"], load=str(tmp_path), **SCHEDULE))
    assert resumed.load() == 2
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.hf_named_tensors())
    again = run(resumed, range(2, 4))
    assert [m["train/loss"] for m in again] == pytest.approx([m["train/loss"] for m in later], abs=1e-6)


def test_a_set_that_could_not_be_written_beside_the_training_is_an_error_of_the_next_save(
    checkpoints: dict[str, Path], trainer_of: TrainerOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles.backends.megatron_utils import checkpoint_files

    def full(*call: Any) -> None:
        raise OSError("No space left on device")

    trainer = trainer_of(make_args(checkpoints["qwen3-tied"], save=str(tmp_path), async_save=True, **SCHEDULE))
    run(trainer, range(1))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "write_file", full)
        trainer.save(0)
        with pytest.raises(OSError, match="No space left"):
            trainer.finish_saving()
    assert not list(tmp_path.iterdir()), "nothing of it stays behind"
    assert verify(Path(trainer.save(0))) is not None, "not there yet"
    trainer.finish_saving()
    assert verify(tmp_path / "iter_0000000") is None
