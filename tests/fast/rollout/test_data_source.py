from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout import data_source as module
from miles.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first, state_path
from miles.rollout.sample_codec import SampleCodecError
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer, make_args


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch):
    monkeypatch.setattr("miles.utils.processing_utils.load_tokenizer", lambda *args, **kwargs: CharTokenizer())


def write_prompts(directory, n: int) -> str:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": str(i), "label": i}) + "\n" for i in range(n)))
    return str(path)


def flags(directory, n=5, **overrides):
    defaults = {
        "rollout_global_dataset": True,
        "prompt_data": write_prompts(directory, n),
        "input_key": "input",
        "label_key": "label",
        "metadata_key": "metadata",
        "rollout_shuffle": False,
        "save": str(directory / "ckpt"),
        "load": str(directory / "ckpt"),
    }
    return make_args(**{**defaults, **overrides})


def prompts(groups) -> list[str]:
    return [group[0].prompt for group in groups]


# Fresh groups


def test_a_group_is_its_own_copies_of_one_prompt_numbered_over_the_run(tmp_path):
    source = RolloutDataSource(flags(tmp_path))
    first, second = source.get_samples(2)
    assert [(s.group_index, s.index, s.prompt, s.label) for s in first + second] == [
        (0, 0, "0", 0),
        (0, 1, "0", 0),
        (1, 2, "1", 1),
        (1, 3, "1", 1),
    ]
    first[0].metadata["changed"] = True
    assert first[1].metadata == {}
    assert source.dataset[0].metadata == {}


def test_epochs_follow_each_other_without_a_gap(tmp_path):
    source = RolloutDataSource(flags(tmp_path, n=3))
    assert prompts(source.get_samples(2)) == ["0", "1"]
    assert prompts(source.get_samples(8)) == ["2", "0", "1", "2", "0", "1", "2", "0"]
    assert (source.epoch_id, source.sample_offset, source.sample_group_index) == (3, 1, 10)


def test_each_epoch_is_shuffled_by_its_own_seed(tmp_path):
    args = flags(tmp_path, n=20, rollout_shuffle=True)
    taken = prompts(RolloutDataSource(args).get_samples(40))
    assert sorted(taken[:20]) == sorted(taken[20:]) == sorted(map(str, range(20)))
    assert taken[:20] != taken[20:]
    later = flags(tmp_path, n=20, rollout_shuffle=True, rollout_seed=args.rollout_seed + 1)
    assert prompts(RolloutDataSource(later).get_samples(20)) == taken[20:]


def test_without_a_file_samples_are_empty_and_numbered():
    source = RolloutDataSource(make_args(rollout_global_dataset=False))
    (group,) = source.get_samples(1)
    assert group == [Sample(group_index=0, index=0), Sample(group_index=0, index=1)]
    assert source.dataset is None


def test_a_missing_prompt_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="--prompt-data is not set"):
        RolloutDataSource(flags(tmp_path, prompt_data=None))
    with pytest.raises(ValueError, match=r"gone\.jsonl: there is no such file"):
        RolloutDataSource(flags(tmp_path, prompt_data=str(tmp_path / "gone.jsonl")))


def test_a_prompt_beyond_the_models_context_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 16}')
    with pytest.raises(ValueError, match=r"5 of 5 prompts .* an answer of 16 tokens in the context of 16"):
        RolloutDataSource(flags(tmp_path, hf_checkpoint=str(tmp_path)))
    assert RolloutDataSource(flags(tmp_path, hf_checkpoint=str(tmp_path), rollout_max_response_len=15)).dataset
    assert RolloutDataSource(flags(tmp_path, hf_checkpoint=str(tmp_path), rollout_max_context_len=2)).dataset


def test_the_plain_source_takes_nothing_back(tmp_path):
    source = RolloutDataSource(flags(tmp_path))
    with pytest.raises(NotImplementedError, match="RolloutDataSourceWithBuffer"):
        source.add_samples([[Sample(), Sample()]])
    assert source.get_buffer_length() is None


# The buffer


def test_groups_that_came_back_are_handed_out_first_and_oldest_first(tmp_path):
    source = RolloutDataSourceWithBuffer(flags(tmp_path))
    a, b, c = source.get_samples(3)
    source.add_samples([c])
    source.add_samples([a, b])
    assert source.get_buffer_length() == 3
    assert source.get_samples(2) == [c, a]
    mixed = source.get_samples(2)
    assert mixed[0] is b
    assert prompts(mixed) == ["1", "3"]
    assert source.get_buffer_length() == 0


def test_a_group_of_the_wrong_size_is_not_taken_back(tmp_path):
    source = RolloutDataSourceWithBuffer(flags(tmp_path))
    with pytest.raises(ValueError, match="--n-samples-per-prompt 2 samples, got 1 members"):
        source.add_samples([[Sample()]])
    with pytest.raises(ValueError, match="got the type Sample"):
        source.add_samples([Sample()])
    assert source.get_buffer_length() == 0


def test_a_buffer_filter_chooses(tmp_path):
    calls = []

    def last_first(args, rollout_id, buffer, num_samples):
        calls.append((rollout_id, num_samples))
        return [buffer.pop()]

    with function_registry.temporary("test:filter", last_first):
        source = RolloutDataSourceWithBuffer(flags(tmp_path, buffer_filter_path="test:filter"))
    a, b = source.get_samples(2)
    source.add_samples([a, b])
    groups = source.get_samples(2)
    assert groups[0] is b
    assert groups[1][0].prompt == "2"
    assert calls == [(None, 2)]


@pytest.mark.parametrize("returned", [None, [[], [], []]])
def test_a_buffer_filter_with_the_wrong_return_is_named(tmp_path, returned):
    with function_registry.temporary("test:filter", lambda *args: returned):
        source = RolloutDataSourceWithBuffer(flags(tmp_path, buffer_filter_path="test:filter"))
    source.add_samples(source.get_samples(1))
    with pytest.raises(ValueError, match="buffer filter test:filter must return a list of at most 2 groups, got"):
        source.get_samples(2)


def test_pop_first_removes_what_it_returns():
    buffer = [["a"], ["b"], ["c"]]
    assert pop_first(None, None, buffer, 2) == [["a"], ["b"]]
    assert buffer == [["c"]]


def test_metadata_is_kept(tmp_path):
    source = RolloutDataSourceWithBuffer(flags(tmp_path))
    source.update_metadata({"a": 1})
    source.update_metadata({"b": 2})
    assert source.get_metadata() == {"a": 1, "b": 2}


# Save and load


@settings(max_examples=60)
@given(
    n=st.integers(1, 7), shuffle=st.booleans(), before=st.lists(st.integers(0, 9), max_size=4), after=st.integers(1, 20)
)
def test_a_resumed_source_goes_on_with_the_same_sequence(tmp_path_factory, n, shuffle, before, after):
    directory = tmp_path_factory.mktemp("run")
    args = flags(directory, n=n, rollout_shuffle=shuffle)
    source = RolloutDataSourceWithBuffer(args)
    for i, count in enumerate(before):
        groups = source.get_samples(count)
        source.add_samples(groups[i::2])
    source.update_metadata({"k": [1]})
    source.save(3)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(3)
    assert resumed.get_metadata() == {"k": [1]}
    assert resumed.get_buffer_length() == source.get_buffer_length()
    assert resumed.get_samples(after) == source.get_samples(after)


def test_buffered_groups_are_saved_with_what_was_generated(tmp_path):
    args = flags(tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    (group,) = source.get_samples(1)
    group[0].tokens, group[0].status = [1, 2], Sample.Status.ABORTED
    source.add_samples([group])
    source.save(0)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(0)
    assert resumed.buffer == [group]


def test_a_group_that_cannot_be_saved_without_code_is_saved_as_its_prompt_with_a_warning(tmp_path, caplog):
    args = flags(tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(2)
    groups[0][1].metadata["fn"] = print
    source.add_samples(groups)
    source.save(0)
    assert "1 buffered groups are saved without what they had of answers" in caplog.text
    assert "the first because sample 1: metadata.fn" in caplog.text
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(0)
    assert resumed.buffer[1] == groups[1]
    assert [(sample.prompt, sample.index, sample.metadata) for sample in resumed.buffer[0]] == [
        ("0", 0, {}),
        ("0", 1, {}),
    ]


def test_a_prompt_that_cannot_be_saved_is_an_error_that_names_the_field(tmp_path):
    source = RolloutDataSourceWithBuffer(flags(tmp_path))
    groups = source.get_samples(1)
    groups[0][1].label = print
    source.add_samples(groups)
    with pytest.raises(SampleCodecError, match=r"sample 1: label is a builtins.builtin_function_or_method"):
        source.save(0)


def test_nothing_is_saved_or_loaded_without_the_flags(tmp_path):
    source = RolloutDataSource(flags(tmp_path, save=None, load=None))
    source.save(0)
    source.load(0)
    assert not (tmp_path / "ckpt").exists()


def test_a_missing_state_starts_from_the_beginning_with_a_warning(tmp_path, caplog):
    source = RolloutDataSource(flags(tmp_path))
    source.load(None)
    assert caplog.text == ""
    source.load(4)
    assert "there is no data source state" in caplog.text
    assert prompts(source.get_samples(1)) == ["0"]


@pytest.mark.parametrize("text", ["{", "[]", '{"epoch_id": 0}', '{"sample_offset": "x"}'])
def test_an_unusable_state_is_named(tmp_path, text):
    args = flags(tmp_path)
    path = state_path(args.load, 2)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"global_dataset_state_dict_2\.json: not"):
        RolloutDataSource(args).load(2)


def test_a_torch_state_of_the_same_name_is_read_as_plain_data(tmp_path):
    torch = pytest.importorskip("torch")
    args = flags(tmp_path)
    path = state_path(args.load, 2).with_suffix(".pt")
    path.parent.mkdir(parents=True)
    torch.save(
        {"sample_offset": 2, "epoch_id": 0, "sample_group_index": 7, "sample_index": 14, "metadata": {"a": 1}}, path
    )
    source = RolloutDataSource(args)
    source.load(2)
    (group,) = source.get_samples(1)
    assert (group[0].prompt, group[0].group_index, group[0].index) == ("2", 7, 14)


def test_a_save_replaces_the_file_whole(tmp_path, monkeypatch):
    args = flags(tmp_path)
    source = RolloutDataSource(args)
    source.save(0)
    before = state_path(args.save, 0).read_text()
    source.get_samples(1)
    monkeypatch.setattr(module.os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        source.save(0)
    assert state_path(args.save, 0).read_text() == before


def test_a_data_set_that_shrank_is_reported_and_does_not_break(tmp_path, caplog):
    source = RolloutDataSource(flags(tmp_path, n=5))
    source.get_samples(4)
    source.save(0)
    resumed = RolloutDataSource(flags(tmp_path, n=3))
    resumed.load(0)
    assert "has 3 prompts, it had 5" in caplog.text
    assert prompts(resumed.get_samples(1)) == ["0"]
    assert resumed.epoch_id == 1


def test_a_save_from_another_thread_sees_no_half_taken_groups(tmp_path):
    args = flags(tmp_path, n=3)
    source = RolloutDataSourceWithBuffer(args)
    stop, states = threading.Event(), []

    def saver():
        while not stop.is_set():
            states.append(source.state_dict())

    thread = threading.Thread(target=saver)
    thread.start()
    for _ in range(100):
        source.add_samples(source.get_samples(3))
    stop.set()
    thread.join()
    assert all(s["sample_index"] == 2 * s["sample_group_index"] for s in states)


# Fresh groups past the buffer


@pytest.mark.parametrize("cls", [RolloutDataSource, RolloutDataSourceWithBuffer])
def test_fresh_groups_are_numbered_on_and_pass_the_buffer_by(tmp_path, cls):
    source = cls(flags(tmp_path))
    first, *_ = source.get_samples(2)
    if cls is RolloutDataSourceWithBuffer:
        source.add_samples([first])
    assert prompts(source.get_fresh_samples(4)) == ["2", "3", "4", "0"]
    assert (source.epoch_id, source.sample_offset, source.sample_group_index) == (1, 1, 6)
    if cls is RolloutDataSourceWithBuffer:
        assert source.get_samples(1) == [first]


def test_an_epoch_with_fewer_prompts_than_a_batch_goes_on_in_the_next_one(tmp_path):
    source = RolloutDataSource(flags(tmp_path, n=3, rollout_shuffle=True))
    taken = prompts(source.get_samples(8))
    assert [sorted(taken[:3]), sorted(taken[3:6])] == [["0", "1", "2"]] * 2
    assert len(taken) == 8 and source.epoch_id == 2
