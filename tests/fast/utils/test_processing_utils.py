from __future__ import annotations

import json

import pytest

from miles.utils.processing_utils import (
    encode_image_for_rollout_engine,
    load_processor,
    load_tokenizer,
    model_context_length,
)


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with a word-level tokenizer of five words."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {word: i for i, word in enumerate(["<unk>", "<eos>", "a", "b", "c"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<eos>",
                "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
            }
        )
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")
    return tmp_path


def test_a_tokenizer_is_loaded_without_running_code_of_the_checkpoint(checkpoint):
    tokenizer = load_tokenizer(str(checkpoint))
    assert tokenizer.encode("a c b", add_special_tokens=False) == [2, 4, 3]
    assert tokenizer.decode([2, 3]) == "a b"
    assert tokenizer.eos_token == "<eos>"
    assert load_tokenizer(str(checkpoint), trust_remote_code=True).eos_token == "<eos>"


def test_a_chat_template_may_come_from_a_file(checkpoint, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}|")
    tokenizer = load_tokenizer(str(checkpoint), chat_template_path=str(template))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a|"
    with pytest.raises(ValueError, match="--chat-template-path nope: No such file"):
        load_tokenizer(str(checkpoint), chat_template_path="nope")


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=rf"--hf-checkpoint {tmp_path}: no tokenizer in this directory"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="--hf-checkpoint is not set"):
        load_tokenizer(None)


def test_a_text_only_checkpoint_has_no_processor(checkpoint):
    assert load_processor(str(checkpoint)) is None


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"text_config": {"max_position_embeddings": 32}}, 32),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default"}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({}, None),
    ],
)
def test_the_context_length_is_the_models(tmp_path, config, length):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_context_length(str(tmp_path)) == length


def test_the_context_length_of_no_directory_is_unknown_and_a_broken_config_is_named(tmp_path):
    assert model_context_length(None) is None
    assert model_context_length("some/hub-name") is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        model_context_length(str(tmp_path))


def test_an_image_becomes_a_data_uri_and_a_string_stays():
    image_module = pytest.importorskip("PIL.Image")
    assert encode_image_for_rollout_engine(image_module.new("P", (2, 2))).startswith("data:image/png;base64,")
    assert encode_image_for_rollout_engine("http://x/y.png") == "http://x/y.png"
