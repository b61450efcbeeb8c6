from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.utils.data import Dataset, SlicedPath, copy_prompt, read_rows
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer


@pytest.fixture
def write(tmp_path):
    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text)
        return str(path)

    return write


def dataset(path, max_length=None, **keywords) -> Dataset:
    return Dataset(path, CharTokenizer(), None, max_length, **keywords)


def prompts(data: Dataset) -> list:
    return [sample.prompt for sample in data.samples]


# Reading


def test_jsonl_rows_become_samples_in_file_order(write):
    path = write([{"q": "A", "a": "1", "metadata": {"k": 1}}, {"q": "B", "a": 2}])
    data = dataset(path, prompt_key="q", label_key="a")
    assert [(s.prompt, s.label, s.metadata) for s in data.samples] == [("A", "1", {"k": 1}), ("B", 2, {})]
    assert len(data) == 2
    assert data[1].prompt == "B"


def test_parquet_rows_become_samples(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "data.parquet")
    messages = [[{"role": "user", "content": "A"}], [{"role": "user", "content": "B"}]]
    pq.write_table(pa.table({"input": messages, "metadata": ['{"k": 1}', None], "label": ["x", "y"]}), path)
    data = dataset(path, label_key="label")
    assert prompts(data) == messages
    assert [s.metadata for s in data.samples] == [{"k": 1}, {}]
    assert prompts(dataset(path + "@[1:]")) == messages[1:]
    with pytest.raises(ValueError, match=r"row 0: has no key 'nope', it has input, label, metadata"):
        dataset(path, prompt_key="nope")


def test_tools_land_in_the_metadata_as_a_list(write):
    path = write([{"input": "A", "tools": [{"t": 1}]}, {"input": "B", "tools": '[{"t": 2}]'}, {"input": "C"}])
    data = dataset(path, tool_key="tools")
    assert [s.metadata for s in data.samples] == [{"tools": [{"t": 1}]}, {"tools": [{"t": 2}]}, {}]


def test_the_chat_template_is_applied_to_messages_and_to_bare_text(write):
    path = write([{"input": [{"role": "user", "content": "A"}], "tools": [{}]}, {"input": "B"}])
    data = dataset(path, tool_key="tools", apply_chat_template=True, apply_chat_template_kwargs={"suffix": "!"})
    assert prompts(data) == ["[1 tools]<user>A<assistant>!", "<user>B<assistant>!"]
    assert prompts(dataset(path))[0] == [{"role": "user", "content": "A"}]


def test_blank_lines_are_skipped_and_still_counted(write):
    path = write('{"input": "A"}\n\n{"input": "B"}\n   \nbroken\n')
    with pytest.raises(ValueError, match="line 5: not valid JSON"):
        dataset(path)
    assert prompts(dataset(path + "@[:2]")) == ["A", "B"]


# Bad input


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": "A"}\n{"input": \n', "line 2: not valid JSON"),
        ("[1]\n", "line 1: expected a JSON object, got list"),
        ('{"prompt": "A"}\n', "line 1: has no key 'input', it has prompt"),
        ('{"input": 3}\n', "line 1: 'input' must be text or a list of messages, got 3"),
        ('{"input": []}\n', "line 1: 'input' must be text or a list of messages"),
        ('{"input": "A", "metadata": [1]}\n', "line 1: 'metadata' must be an object, got list"),
        ('{"input": "A", "metadata": "no"}\n', "line 1: 'metadata' is a string but not valid JSON"),
        ('{"input": "A", "tools": {"x": 1}}\n', "line 1: 'tools' must be a list of tools, got dict"),
        ("", "it is empty"),
        ("\n\n", "it is empty"),
    ],
)
def test_a_bad_file_is_named_with_line_and_key(write, text, message):
    path = write(text)
    with pytest.raises(ValueError) as raised:
        dataset(path, tool_key="tools")
    assert path in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize("templated", [False, True])
@pytest.mark.parametrize("prompt", ["", "\u200b" * 50])
def test_a_prompt_without_tokens_is_named_with_its_line(write, prompt, templated):
    class Picky(CharTokenizer):
        def encode(self, text, add_special_tokens=True):
            return [ord(c) for c in text if c.isascii()]

        def apply_chat_template(self, messages, **keywords):
            return messages[0]["content"]

    path = write([{"input": "A"}, {"input": "\u200b" * 50 + "A"}, {"input": prompt}])
    with pytest.raises(ValueError, match=r"data\.jsonl, line 3: 'input' has no tokens: '"):
        Dataset(path, Picky(), apply_chat_template=templated)
    assert len(Dataset(path + "@[:2]", Picky(), apply_chat_template=templated)) == 2


def test_a_missing_label_is_named(write):
    with pytest.raises(ValueError, match="line 2: has no key 'label', it has input"):
        dataset(write([{"input": "A", "label": 1}, {"input": "B"}]), label_key="label")


def test_a_missing_chat_template_names_the_flag_that_gives_one(write):
    class Bare:
        chat_template = None

    with pytest.raises(ValueError, match=r"line 1: --apply-chat-template: .* no chat template.*--chat-template-path"):
        Dataset(write([{"input": "A"}]), Bare(), apply_chat_template=True)


def test_a_failing_chat_template_is_named_with_its_line(write):
    class Strict(CharTokenizer):
        def apply_chat_template(self, messages, **keywords):
            raise LookupError("roles must alternate")

    with pytest.raises(ValueError, match="line 1: --apply-chat-template failed: roles must alternate"):
        Dataset(write([{"input": "A"}]), Strict(), apply_chat_template=True)


def test_a_missing_file_and_an_unknown_ending_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.jsonl: there is no such file"):
        dataset(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(ValueError, match=r"data\.csv: the file name must end in \.jsonl or \.parquet"):
        dataset(str(tmp_path / "data.csv"))


def test_a_broken_parquet_file_is_named(write):
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"data\.parquet: not a readable parquet file"):
        dataset(write("not parquet", "data.parquet"))


# Slices


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a.jsonl", SlicedPath("a.jsonl")),
        ("a.jsonl@[2:5]", SlicedPath("a.jsonl", 2, 5)),
        ("a.jsonl@[:5]", SlicedPath("a.jsonl", None, 5)),
        ("a@b.jsonl@[-3:]", SlicedPath("a@b.jsonl", -3, None)),
        ("a.jsonl@[:]", SlicedPath("a.jsonl")),
    ],
)
def test_a_slice_is_written_after_an_at_sign(text, parsed):
    assert SlicedPath.parse(text) == parsed


@pytest.mark.parametrize("text", ["a.jsonl@[2]", "a.jsonl@[a:b]", "a.jsonl@[1:2", "a.jsonl@[-:2]", "a.jsonl@[1:2:3]"])
def test_a_malformed_slice_is_an_error(text):
    with pytest.raises(ValueError, match=r"path@\[start:stop\]"):
        SlicedPath.parse(text)


@pytest.mark.parametrize("bounds", ["0:4", "4:", "-4:", ":-4"])
def test_a_slice_out_of_range_is_an_error(write, bounds):
    path = write([{"input": c} for c in "ABC"])
    with pytest.raises(ValueError, match="out of range, the file has 3 rows"):
        read_rows(f"{path}@[{bounds}]")


@pytest.mark.parametrize("bounds", ["3:", "2:1", "1:1", ":0"])
def test_an_empty_slice_is_an_error(write, bounds):
    path = write([{"input": c} for c in "ABC"])
    with pytest.raises(ValueError, match="the slice is empty, the file has 3 rows"):
        read_rows(f"{path}@[{bounds}]")


@settings(deadline=None)
@given(length=st.integers(1, 12), data=st.data())
def test_a_slice_in_range_selects_what_python_selects(length, data):
    bound = st.none() | st.integers(-length, length)
    start, stop = data.draw(bound), data.draw(bound)
    rows = list(range(length))
    expected = rows[start:stop]
    sliced = SlicedPath("f", start, stop)
    assert SlicedPath.parse(str(sliced)) == sliced
    if expected:
        low, high = sliced.bounds(length)
        assert rows[low:high] == expected
    else:
        with pytest.raises(ValueError, match="empty"):
            sliced.bounds(length)


# Long prompts


def test_prompts_over_the_length_limit_are_left_out_with_a_count(write, caplog):
    path = write([{"input": "A" * n} for n in (5, 50, 6, 60)])
    assert [len(p) for p in prompts(dataset(path, 10))] == [5, 6]
    assert "2 of 4 prompts are longer than the limit of 10 tokens" in caplog.text
    with pytest.raises(ValueError, match="all 4 prompts are longer than the limit of 4 tokens"):
        dataset(path, 4)


def test_prompts_beyond_the_context_are_refused_with_count_and_first_index(write):
    path = write([{"input": "A" * n} for n in (5, 10, 6, 60)])
    with pytest.raises(ValueError, match=r"2 of 4 prompts .* context of 10 tokens; the first is number 1 .* 10 tokens"):
        dataset(path, max_context_length=10)
    assert len(dataset(path, max_context_length=61)) == 4


def test_a_smaller_limit_leaves_prompts_out_before_the_context_refuses_them(write):
    path = write([{"input": "A" * n} for n in (5, 60)])
    assert len(dataset(path, 8, max_context_length=20)) == 1
    with pytest.raises(ValueError, match="context of 20 tokens"):
        dataset(path, 19, max_context_length=20)


def test_message_prompts_are_measured_as_rendered(write):
    path = write([{"input": [{"role": "user", "content": "AAAA"}]}])
    with pytest.raises(ValueError, match=r"number 0 .* with 21 tokens"):
        dataset(path, max_context_length=21)
    assert len(dataset(path, max_context_length=22)) == 1


def test_images_are_refused_with_what_to_do(write):
    with pytest.raises(ValueError, match="--multimodal-keys"):
        dataset(write([{"input": "A"}]), multimodal_keys={"image": "images"})


# Epochs


@settings(deadline=None)
@given(n=st.integers(1, 30), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_each_epoch_is_a_permutation_that_depends_on_seed_and_epoch_alone(tmp_path_factory, n, seed, epoch):
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    path.write_text("".join(json.dumps({"input": str(i)}) + "\n" for i in range(n)))
    direct, after_others = dataset(str(path), seed=seed), dataset(str(path), seed=seed)
    direct.shuffle(epoch)
    for other in (3, 1, epoch):
        after_others.shuffle(other)
    assert prompts(direct) == prompts(after_others)
    assert sorted(prompts(direct), key=int) == [str(i) for i in range(n)]
    same_sum = dataset(str(path), seed=seed + epoch)
    same_sum.shuffle(0)
    assert prompts(same_sum) == prompts(direct)


def test_epochs_differ(write):
    data = dataset(write([{"input": str(i)} for i in range(50)]))
    orders = []
    for epoch in range(3):
        data.shuffle(epoch)
        orders.append(prompts(data))
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != [str(i) for i in range(50)]


# Copies


def test_a_copied_prompt_is_equal_and_shares_nothing_that_can_change():
    prompt = Sample(
        prompt=[{"role": "user", "content": "A"}],
        metadata={"tools": [{"a": [1]}]},
        multimodal_inputs={"images": ["x"]},
        status=Sample.Status.ABORTED,
        label=("t", 1),
    )
    prompt.of_a_plugin = [1]
    duplicate = copy_prompt(prompt)
    assert duplicate == prompt
    duplicate.prompt[0]["content"] = "B"
    duplicate.metadata["tools"][0]["a"].append(2)
    duplicate.multimodal_inputs["images"].clear()
    duplicate.tokens.append(1)
    duplicate.weight_versions.append("1")
    duplicate.spec_info.spec_verify_ct = 9
    duplicate.prefix_cache_info.cached_tokens = 9
    duplicate.of_a_plugin.append(2)
    assert prompt == Sample(
        prompt=[{"role": "user", "content": "A"}],
        metadata={"tools": [{"a": [1]}]},
        multimodal_inputs={"images": ["x"]},
        status=Sample.Status.ABORTED,
        label=("t", 1),
    )
    assert prompt.of_a_plugin == [1]
