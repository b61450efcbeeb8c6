from __future__ import annotations

from argparse import Namespace

import pytest

from miles.utils.eval_config import EvalDatasetConfig, resolve_eval_datasets

FLAGS = {
    "input_key": "input",
    "label_key": "label",
    "metadata_key": "metadata",
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_max_response_len": 100,
    "rollout_stop": ["r"],
    "n_samples_per_eval_prompt": 1,
}


def resolve(**flags):
    return resolve_eval_datasets(Namespace(**{**FLAGS, **flags}))


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "eval.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_the_flag_names_pairs_of_name_and_path():
    one, two = resolve(eval_prompt_data=["a", "a.jsonl", "b", "b.jsonl@[0:9]"])
    assert (one.name, one.path, two.name, two.path) == ("a", "a.jsonl", "b", "b.jsonl@[0:9]")
    (alone,) = resolve(eval_prompt_data=["dir/math.jsonl@[0:9]"])
    assert (alone.name, alone.path) == ("math", "dir/math.jsonl@[0:9]")
    assert resolve() == []


def test_a_value_comes_from_the_entry_then_the_defaults_then_the_eval_flag_then_the_rollout_flag(config_file):
    path = config_file(
        """
        eval:
          defaults: {temperature: 0.3, top_p: 0.9, n_samples_per_eval_prompt: 4}
          datasets:
            - {name: a, path: a.jsonl, temperature: 0.0, rm_type: math}
            - {name: b, path: b.jsonl, stop: [x]}
        """
    )
    a, b = resolve(eval_config=path, eval_top_p=0.5, eval_top_k=7, eval_label_key="answer")
    assert (a.temperature, a.top_p, a.top_k, a.max_response_len) == (0.0, 0.9, 7, 100)
    assert (a.n_samples_per_eval_prompt, a.label_key, a.stop, a.rm_type) == (4, "answer", ["r"], "math")
    assert (b.temperature, b.stop) == (0.3, ["x"])


def test_a_file_may_name_its_data_sets_as_a_mapping_at_its_root(config_file):
    (config,) = resolve(eval_config=config_file("datasets: {a: {path: a.jsonl}}"))
    assert (config.name, config.path) == ("a", "a.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets: [{name: a}]", "data set a: 'path' is missing"),
        ("datasets: [{path: a.jsonl}]", "'name' is missing"),
        ("datasets: [{name: a, path: p, heat: 1}]", "unknown heat; known: "),
        ("{defaults: {nope: 1}, datasets: [{name: a, path: p}]}", "unknown nope"),
        ("datasets: [{name: a, path: p}, {name: a, path: q}]", "more than once: a"),
        ("datasets: [{name: a, path: p, n_samples_per_eval_prompt: 0}]", "must be at least 1, got 0"),
        ("datasets: 3", "must be a list of mappings"),
        ("[1]", "expected a mapping with 'datasets'"),
        ("{", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_by_name(config_file, text, message):
    with pytest.raises(ValueError) as raised:
        resolve(eval_config=config_file(text))
    assert message in str(raised.value)


def test_a_missing_file_both_flags_and_half_a_pair_are_refused(config_file):
    with pytest.raises(ValueError, match=r"--eval-config nope.yaml: No such file"):
        resolve(eval_config="nope.yaml")
    with pytest.raises(ValueError, match="exclude each other"):
        resolve(eval_config=config_file("datasets: []"), eval_prompt_data=["a", "b"])
    with pytest.raises(ValueError, match="NAME PATH pairs, got 3 values"):
        resolve(eval_prompt_data=["a", "b", "c"])


def test_metadata_is_copied_and_overridden():
    config = EvalDatasetConfig("a", "p", rm_type="math", metadata_overrides={"level": 2})
    original = {"level": 1, "k": 0}
    assert config.inject_metadata(original) == {"level": 2, "k": 0, "rm_type": "math"}
    assert original == {"level": 1, "k": 0}
    assert config.inject_metadata(None) == {"rm_type": "math", "level": 2}


def test_the_cache_key_is_what_decides_the_prompts():
    base = EvalDatasetConfig("a", "p")
    assert base.cache_key == EvalDatasetConfig("a", "p", temperature=0.0, rm_type="f1").cache_key
    assert base.cache_key != EvalDatasetConfig("a", "p", input_key="q").cache_key
    assert hash(base.cache_key) is not None


@pytest.mark.parametrize(("value", "shown"), [(".inf", "inf"), (".nan", "nan"), ("hot", "'hot'"), ("true", "True")])
@pytest.mark.parametrize("key", ["temperature", "top_p"])
def test_numbers_are_finite(config_file, key, value, shown):
    path = config_file(f"datasets: [{{name: a, path: a.jsonl, {key}: {value}}}]")
    with pytest.raises(ValueError, match=f"evaluation data set a: {key} must be a finite number, got {shown}"):
        resolve(eval_config=path)
