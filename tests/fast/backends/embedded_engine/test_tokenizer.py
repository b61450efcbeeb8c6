from __future__ import annotations

import json
from typing import TYPE_CHECKING

from miles.backends.embedded_engine.tokenizer import end_token_ids, load_tokenizer
from tests.fast.backends.embedded_engine.tiny import EOS_ID, char_ids

if TYPE_CHECKING:
    from pathlib import Path


def test_text_goes_to_ids_and_back(model_dir: Path) -> None:
    tokenizer = load_tokenizer(str(model_dir))
    assert tokenizer is not None
    ids = tokenizer.encode("52914> x")
    assert ids == char_ids("52914> x")
    assert tokenizer.decode([*ids, EOS_ID], skip_special_tokens=True) == "52914> x"
    assert tokenizer.decode([*ids, EOS_ID], skip_special_tokens=False) == "52914> x<eos>"


def test_a_directory_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(str(tmp_path)) is None
    assert end_token_ids(str(tmp_path), None) == frozenset()


def test_end_tokens_come_from_all_three_places(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert end_token_ids(str(tmp_path), tokenizer) == {EOS_ID, 5, 6, 7}
