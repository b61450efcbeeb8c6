"""The quickstart's data: deterministic, cached, held-out prompts held out, a checkpoint that loads."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from examples.quickstart import make_prompts
from examples.quickstart.make_base_model import END, make_tokenizer, taught_answer
from examples.quickstart.prepare import RECORD, prepare
from examples.quickstart.reward import reward

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 3


def digest(directory: Path) -> str:
    """Of every file's name and bytes."""
    result = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            result.update(str(path.relative_to(directory)).encode() + path.read_bytes())
    return result.hexdigest()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("quickstart") / "data", steps=STEPS)


def test_two_runs_make_the_same_bytes(data: Path, tmp_path: Path) -> None:
    assert digest(prepare(tmp_path / "again", steps=STEPS)) == digest(data)


def test_a_second_call_reuses_what_is_there(data: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    assert prepare(data, steps=STEPS) == data
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before


def test_other_settings_or_a_damaged_record_make_it_anew(tmp_path: Path) -> None:
    data = prepare(tmp_path / "data", steps=1)
    (data / RECORD).write_text("{", encoding="utf-8")
    (data / "left-over").touch()
    prepare(data, steps=1)
    assert json.loads((data / RECORD).read_text())["base_model"]["steps"] == 1
    assert not (data / "left-over").exists()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["data"]


def test_prompts_are_distinct_and_evaluation_is_held_out(data: Path) -> None:
    sides = {}
    for name in ("train", "eval"):
        rows = [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]
        assert all(row["label"] == "".join(sorted(row["input"].removesuffix(">"))) for row in rows)
        assert all(4 <= row["metadata"]["num_digits"] == len(row["label"]) <= 6 for row in rows)
        assert len({row["input"] for row in rows}) == len(rows)
        sides[name] = {row["label"] for row in rows}
    assert len(sides["train"]) > len(sides["eval"]) > 100
    assert not sides["train"] & sides["eval"]


def test_the_checkpoint_loads_and_answers_in_tokens(data: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data / "base_model")
    config = AutoConfig.from_pretrained(data / "base_model")
    assert config.model_type == "qwen3" and config.tie_word_embeddings
    assert config.vocab_size == len(tokenizer) == 98
    assert config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer.encode("52914>")
    assert len(ids) == 6
    assert tokenizer.decode([*ids, tokenizer.eos_token_id]) == "52914>" + END
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "52914>"


def test_every_printable_character_is_one_token() -> None:
    tokenizer = make_tokenizer()
    text = "\n" + "".join(map(chr, range(32, 127)))
    ids = tokenizer.encode(text)
    assert len(set(ids)) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_taught_answers_are_right_as_often_as_asked() -> None:
    import random

    rng = random.Random(0)
    answers = [taught_answer("52914", rng, 0.3) for _ in range(4000)]
    assert set(answers) == {"12459", "95421", "52914"}
    assert answers.count("12459") / 4000 == pytest.approx(0.3, abs=0.03)
    assert answers.count("95421") / 4000 == pytest.approx(0.35, abs=0.03)


def test_held_out_does_not_depend_on_the_order_of_the_digits() -> None:
    assert make_prompts.is_held_out("7700") and make_prompts.is_held_out("0707")
    assert not make_prompts.is_held_out("1000")


async def test_reward_is_exact_match_for_one_sample_and_for_a_list() -> None:
    from argparse import Namespace

    from miles.utils.types import Sample

    right, wrong = Sample(response="12459", label="12459"), Sample(response="124599", label="12459")
    assert await reward(Namespace(), right) == 1.0
    assert await reward(Namespace(), [right, wrong]) == [1.0, 0.0]
