"""What the rollout side keeps in a checkpoint set, and what it makes of one."""

from __future__ import annotations

import json
import logging
import threading
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest

from miles.ray.rollout.rollout_state import RolloutState, _write_json
from miles.rollout._fully_async_snapshot import Moment
from miles.rollout.base_types import RolloutFnTrainInput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.inference_rollout.compatibility import call_rollout_function
from miles.utils import checkpoint_set
from miles.utils.async_utils import LOOP_THREAD_NAME, run, use_async_loop
from tests.fast.fakes import group_indexes
from tests.fast.rollout.fully_async_setup import build

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def rollout_loop() -> Iterator[None]:
    with use_async_loop():
        yield


class AsyncFn:
    """A rollout function with a state; notes what it is told, and that it is told on the rollout loop."""

    def __init__(self, data_source: Any) -> None:
        self.data_source = data_source
        self.told: list[tuple[str, int]] = []
        self.queued: list[int] = []

    def acknowledge(self, rollout_id: int) -> int:
        self._note("acknowledge", rollout_id)
        return 4

    def give_back(self, rollout_id: int) -> int:
        self._note("give_back", rollout_id)
        return 4

    def on_weight_version(self, version: int) -> None:
        self._note("on_weight_version", version)

    def announce_weight_version(self, version: int) -> bool:
        self._note("announce_weight_version", version)
        return version != 7

    def _note(self, what: str, value: int) -> None:
        assert threading.current_thread().name == LOOP_THREAD_NAME
        self.told.append((what, value))

    def snapshot(self) -> dict[str, Any]:
        assert threading.current_thread().name == LOOP_THREAD_NAME
        return {"queued": self.queued, "data_source": self.data_source.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        assert threading.current_thread().name == LOOP_THREAD_NAME
        self.queued = state["queued"]
        self.data_source.load_state_dict(state["data_source"])


def plain_fn(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> None:
    """A rollout function without a state."""


def make_args(root: Path) -> Namespace:
    return Namespace(save=str(root), load=str(root), n_samples_per_prompt=2, rollout_global_dataset=False)


class PluginSource:
    """A data source without `state_dict`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int | None]] = []

    def save(self, rollout_id: int) -> None:
        self.calls.append(("save", rollout_id))

    def load(self, rollout_id: int | None = None) -> None:
        self.calls.append(("load", rollout_id))


class SavesMore(RolloutDataSourceWithBuffer):
    """A built-in source whose `save` also keeps something else."""

    calls: tuple[str, ...] = ()

    def save(self, rollout_id: int) -> None:
        super().save(rollout_id)
        self.calls += ("save",)

    def load(self, rollout_id: int | None = None) -> None:
        super().load(rollout_id)
        self.calls += ("load",)


def publish(root: Path, state: RolloutState, rollout_id: int) -> Path:
    """The set after `rollout_id`, with the part that `state` stages."""
    staged = state.save(str(root), rollout_id)
    target = checkpoint_set.set_path(root, rollout_id)
    target.mkdir()
    checkpoint_set.take_rollout_part(staged, target)
    checkpoint_set.write_record(target, {"rollout_id": rollout_id})
    assert checkpoint_set.verify(target) is None
    return target


def test_a_function_with_a_state_hears_of_training_on_the_rollout_loop(tmp_path: Path) -> None:
    fn = AsyncFn(None)
    state = RolloutState(fn, PluginSource(), saves=True)
    state.acknowledge(3)
    state.give_back(4)
    state.on_weight_version(5)
    assert state.announce_weight_version(6) and not state.announce_weight_version(7)
    assert fn.told == [
        ("acknowledge", 3),
        ("give_back", 4),
        ("on_weight_version", 5),
        ("announce_weight_version", 6),
        ("announce_weight_version", 7),
    ]


def test_a_function_without_a_state_hears_of_nothing() -> None:
    state = RolloutState(plain_fn, PluginSource(), saves=True)
    state.before_generate(3)
    state.acknowledge(3)
    state.give_back(4)
    state.on_weight_version(5)
    assert state.announce_weight_version(6)


def test_snapshot_and_restore_carry_function_and_data_source(tmp_path: Path) -> None:
    source = RolloutDataSourceWithBuffer(make_args(tmp_path))
    fn = AsyncFn(source)
    source.get_samples(5)
    fn.queued = [3, 4]
    saved = publish(tmp_path, RolloutState(fn, source, saves=True), 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000002"], "one set, and nothing beside it"

    source = RolloutDataSourceWithBuffer(make_args(tmp_path))
    fn = AsyncFn(source)
    RolloutState(fn, source, saves=True).load(saved)
    assert fn.queued == [3, 4] and source.sample_group_index == 5


def test_the_fully_async_rollout_goes_on_with_every_group_that_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> tuple[Any, RolloutState]:
        source = RolloutDataSourceWithBuffer(make_args(tmp_path))
        fn = build(monkeypatch, data_source=source)
        return fn, RolloutState(fn, source, saves=True)

    def drain(fn: Any, rollout_id: int) -> list[int]:
        return group_indexes(call_rollout_function(fn, RolloutFnTrainInput(rollout_id)).samples)

    fn, state = start()
    state.on_weight_version(1)
    trained = drain(fn, 0)
    state.acknowledge(0)
    drained = drain(fn, 1)
    saved = publish(tmp_path, state, 0)
    run(fn.close())

    fn, state = start()
    state.load(saved)
    state.on_weight_version(2)
    for rollout_id in range(1, 6):
        trained += drain(fn, rollout_id)
        state.acknowledge(rollout_id)
    run(fn.close())
    assert len(set(trained)) == len(trained) == 12
    assert set(drained) <= set(trained[2:])
    assert set(range(8)) <= set(trained), "groups are generated at once, so they come nearly in order"


def test_answers_are_encoded_off_the_rollout_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = RolloutDataSourceWithBuffer(make_args(tmp_path))
    fn = build(monkeypatch, data_source=source)
    names: list[str] = []
    parts = Moment.parts

    def note_thread(self: Moment, *pause: Any) -> Any:
        names.append(threading.current_thread().name)
        return parts(self, *pause)

    monkeypatch.setattr(Moment, "parts", note_thread)
    state = RolloutState(fn, source, saves=True)
    call_rollout_function(fn, RolloutFnTrainInput(0))
    publish(tmp_path, state, 0)
    run(fn.close())
    assert names == [threading.current_thread().name] != [LOOP_THREAD_NAME]


def test_a_batch_that_nobody_has_trained_on_is_generated_again(tmp_path: Path) -> None:
    """One step off, batch 1 is generated while batch 0 is trained on and saved."""
    source = RolloutDataSourceWithBuffer(make_args(tmp_path))
    state = RolloutState(plain_fn, source, saves=True)
    for rollout_id in (0, 1):
        state.before_generate(rollout_id)
        source.get_samples(4)
    saved = publish(tmp_path, state, 0)
    state.before_generate(2)
    source.get_samples(4)
    later = publish(tmp_path, state, 1)

    for path, expected in ((saved, 4), (later, 8)):
        resumed = RolloutDataSourceWithBuffer(make_args(tmp_path))
        RolloutState(plain_fn, resumed, saves=True).load(path)
        assert resumed.sample_group_index == expected


def test_in_turns_the_data_source_is_saved_as_it_is(tmp_path: Path) -> None:
    source = RolloutDataSourceWithBuffer(make_args(tmp_path))
    state = RolloutState(plain_fn, source, saves=True)
    state.before_generate(0)
    source.get_samples(4)
    resumed = RolloutDataSourceWithBuffer(make_args(tmp_path))
    RolloutState(plain_fn, resumed, saves=True).load(publish(tmp_path, state, 0))
    assert resumed.sample_group_index == 4


def test_a_plug_in_without_state_dict_keeps_its_own_files(tmp_path: Path) -> None:
    source = PluginSource()
    saved = publish(tmp_path, RolloutState(plain_fn, source, saves=True), 7)
    RolloutState(plain_fn, source, saves=True).load(saved)
    assert source.calls == [("save", 7), ("load", 7)]


def test_a_built_in_source_with_a_save_of_its_own_keeps_both(tmp_path: Path) -> None:
    source = SavesMore(make_args(tmp_path))
    source.get_samples(3)
    saved = publish(tmp_path, RolloutState(plain_fn, source, saves=True), 0)
    resumed = SavesMore(make_args(tmp_path))
    RolloutState(plain_fn, resumed, saves=True).load(saved)
    assert source.calls == ("save",) and resumed.calls == ("load",)
    assert resumed.sample_group_index == 3


def test_a_set_without_a_rollout_part_is_loaded_the_old_way_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = RolloutDataSourceWithBuffer(make_args(tmp_path))
    source.get_samples(6)
    source.save(3)
    old = checkpoint_set.set_path(tmp_path, 3)
    old.mkdir()
    checkpoint_set.write_record(old, {"rollout_id": 3})
    resumed = RolloutDataSourceWithBuffer(make_args(tmp_path))
    with caplog.at_level(logging.WARNING):
        RolloutState(plain_fn, resumed, saves=True).load(old)
    assert resumed.sample_group_index == 6
    assert "has no rollout part" in caplog.text


def test_a_function_that_cannot_restore_says_what_is_lost_and_takes_the_data_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = RolloutDataSourceWithBuffer(make_args(tmp_path))
    source.get_samples(6)
    saved = publish(tmp_path, RolloutState(AsyncFn(source), source, saves=True), 3)
    resumed = RolloutDataSourceWithBuffer(make_args(tmp_path))
    with caplog.at_level(logging.WARNING):
        RolloutState(plain_fn, resumed, saves=True).load(saved)
    assert resumed.sample_group_index == 6
    assert "AsyncFn has saved groups" in caplog.text


def test_a_part_that_cannot_be_used_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    source = RolloutDataSourceWithBuffer(make_args(tmp_path))
    saved = publish(tmp_path, RolloutState(plain_fn, source, saves=True), 3)
    (saved / "rollout/state.json").write_text('{"format": 1, "rollout_id": 4}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"iter_0000003/rollout/state.json cannot be loaded.*of rollout 4"):
        RolloutState(plain_fn, source, saves=True).load(saved)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": [], "b": {}, "c": None},
        {"a": {"b": [{"c": [1.5, float("-inf")]}, {"d": {"e": "\n\u00e9"}}]}, "f": [[1, 2], [3]]},
        [1, "x", {"y": [{}]}],
    ],
)
def test_writing_in_pieces_gives_the_same_json(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with path.open("w", encoding="utf-8") as file:
        _write_json(file, value)
    assert json.loads(path.read_text(encoding="utf-8")) == value
