from __future__ import annotations

import json

import pytest

from miles.rollout.prompt_data import check_prompt_data
from miles.utils.eval_config import EvalDatasetConfig
from tests.fast.rollout.engine_stub import CharTokenizer, make_args


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr("miles.utils.processing_utils.load_tokenizer", lambda *args, **kwargs: CharTokenizer())

    def write(name, *prompts):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"input": p}) + "\n" for p in prompts))
        return str(path)

    return write


def flags(train, **overrides):
    return make_args(rollout_global_dataset=True, prompt_data=train, **overrides)


def test_good_files_pass(files):
    config = EvalDatasetConfig("e", files("e.jsonl", "A"))
    check_prompt_data(flags(files("t.jsonl", "A"), eval_datasets=[config]))
    check_prompt_data(make_args(eval_datasets=[]))


def test_a_bad_training_file_is_refused(files):
    with pytest.raises(ValueError, match=r"t\.jsonl: it is empty"):
        check_prompt_data(flags(files("t.jsonl")))
    with pytest.raises(ValueError, match=r"line 1: has no key 'question'"):
        check_prompt_data(flags(files("t.jsonl", "A"), input_key="question"))


def test_a_bad_evaluation_file_is_refused_too(files):
    train = files("t.jsonl", "A")
    with pytest.raises(ValueError, match=r"e\.jsonl: it is empty"):
        check_prompt_data(flags(train, eval_prompt_data=["e", files("e.jsonl")]))
    with pytest.raises(ValueError, match=r"e\.jsonl, line 1: has no key 'answer'"):
        configs = [EvalDatasetConfig("e", files("e.jsonl", "A"), label_key="answer")]
        check_prompt_data(flags(train, eval_datasets=configs))


def test_evaluation_prompts_are_held_against_their_own_context(files):
    train, config = files("t.jsonl", "AB"), EvalDatasetConfig("e", files("e.jsonl", "ABCD"))
    with pytest.raises(ValueError, match=r"e\.jsonl: 1 of 1 prompts .* context of 4 tokens"):
        check_prompt_data(flags(train, eval_datasets=[config], rollout_max_context_len=4))
    check_prompt_data(flags(train, eval_datasets=[config], rollout_max_context_len=4, eval_max_context_len=5))
