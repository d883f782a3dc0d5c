import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.environments.rows import message_of, save, write, write_parquet

from recipes.common.addition import is_heldout, make_data, make_tokenizer
from rlworker.config.sections import DataConfig
from rlworker.data.rows import check_rows, check_vocabulary, list_stop_tokens, load_tokenizer, pick_rows, read_rows
from rlworker.data.sources import find_base_folder, iterate_rows
from rlworker.environments.codec import Codec

DATA = DataConfig(max_prompt_tokens=20)
ROW = {"prompt": "1+1=", "answer": "2"}
USER, TOLD = {"role": "user", "content": "1+1="}, {"role": "tool", "content": {"sum": 2}}


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.mark.parametrize("blank", ["", "\n"], ids=["row", "blank line"])
def test_a_byte_order_mark_at_the_beginning_is_no_part_of_the_rows(tmp_path, tokenizer, blank):
    path = write(tmp_path, blank + json.dumps(ROW), ROW)
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "rows.jsonl").read_bytes())
    check_rows(path, DATA)
    assert [row.prompt for row in read_rows(path, tokenizer, DATA).rows] == ["1+1=", "1+1="]
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n\ufeff" + json.dumps(ROW), encoding="utf-8")
    assert "line 2: not JSON: Unexpected UTF-8 BOM" in message_of(read_rows, path, tokenizer, DATA)


def test_text_and_messages(tmp_path, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:"
    messages = [{"role": "u", "content": "1+1"}]
    path = write(tmp_path, {"prompt": "1+1=", "answer": "2", "level": 3}, "", {"prompt": messages, "answer": "2"})
    text, chat = read_rows(path, tokenizer, DATA).rows
    assert (text.prompt, text.answer, text.source["level"]) == ("1+1=", "2", 3)
    assert tokenizer.decode(list(text.prompt_ids)) == "1+1=" and len(text.prompt_ids) == 4
    assert chat.prompt == "u:1+1;a:"


@pytest.mark.parametrize("form", [write, write_parquet, save])
def test_every_form_gives_the_same_rows(tmp_path, tokenizer, form):
    """More rows than one batch of a table has, under other names, with messages and a value of every plain kind."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:"

    def make_row(i: int) -> dict:
        row = {"question": [{"role": "u", "content": f"{i}+1"}], "solution": str(i + 1), "level": i, "weight": i / 8}
        return row | {"tags": [{"name": "x", "on": i % 2 == 0}, {"name": "y", "on": None}]}

    sources = [make_row(i) for i in range(1203)]
    data = DataConfig(prompt_field="question", answer_field="solution", max_prompt_tokens=20)
    path = form(tmp_path, *sources)
    check_rows(path, data)
    rows, skipped = (read := read_rows(path, tokenizer, data)).rows, read.skipped
    assert [row.source for row in rows] == sources and skipped == 0
    assert [row.prompt for row in rows] == [f"u:{i}+1;a:" for i in range(1203)]
    assert [row.answer for row in rows] == [str(i + 1) for i in range(1203)]
    assert {type(v) for v in rows[1202].source.values()} == {list, str, int, float}
    assert type(rows[1202].source["tags"][0]["on"]) is bool


@pytest.mark.parametrize("form", [write, write_parquet, save])
def test_messages_of_a_table_have_no_keys_that_json_has_not(tmp_path, tokenizer, form):
    """A table gives every message the keys of all, and every call the arguments of all."""
    tokenizer.chat_template = (
        "{{ '' if tools }}{% for m in messages %}{{ m.role }}{% if m.name is defined %} named {{ m.name }}{% endif %}:"
        "{% if m.content is none %}-{% else %}{{ m.content + '.' }}{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %};{% endfor %}"
    )
    calls = [{"function": {"name": f"f{i}", "arguments": {"ab"[i]: i + 1}}} for i in range(2)]
    asks = [{"role": "call", "content": None, "tool_calls": [call]} for call in calls]
    chats = [[USER, asks[0]], [{"role": "u", "content": "1", "name": "Bo"}, asks[1]]]
    path = form(tmp_path, *({"prompt": chat, "answer": "2", "tools": calls} for chat in chats))
    data = replace(DATA, max_prompt_tokens=40)
    check_rows(path, data)
    rows = read_rows(path, tokenizer, data).rows
    assert [row.prompt for row in rows] == ['user:1+1=.;call:-{"a": 1};', 'u named Bo:1.;call:-{"b": 2};']
    assert [row.source["prompt"] for row in rows] == chats == [list(row.messages) for row in rows]
    assert rows[1].source["tools"] == calls
    path = form(tmp_path, {"prompt": [USER | {"name": None, "tool_calls": None}], "answer": "2"})
    assert read_rows(path, tokenizer, data).rows[0].prompt == "user named None:1+1=.;", "as transformers renders it"
    flat = [{"tools": [{"name": f"f{i}", "parameters": {"ab"[i]: {"type": "string"}}}]} for i in range(2)]
    path = form(tmp_path, *({"prompt": [USER], "answer": "2"} | tools for tools in flat))
    assert [row.source["tools"] for row in read_rows(path, tokenizer, data).rows] == [tools["tools"] for tools in flat]
    said = message_of(check_rows, form(tmp_path, {"prompt": [USER | {"content": None}], "answer": "2"}), data)
    assert "field \"prompt\", message 0 (from 0), of role 'user', must have content of text or parts" in said


@pytest.mark.parametrize("form", [write, write_parquet, save])
def test_nulls_that_the_author_wrote_stay(tmp_path, form):
    """In fields of the author's own, in JSONL everywhere, and in a table where no row has another value."""
    tool = {"name": "f", "parameters": {"type": "object", "default": None, "enum": ["a", None]}}
    own = [{"role": "judge", "score": None}, {"role": "judge", "score": 1}, {"function": None, "role": "b", "score": 2}]
    row = {"prompt": [USER], "answer": "2", "tools": [tool], "log": own, "extra": {"function": None, "split": "a"}}
    other = {"prompt": [USER | {"name": "Bo"}], "answer": "2", "tools": [tool], "log": [], "extra": {"split": None}}
    rows = [source for _, source in iterate_rows(form(tmp_path, row, other))]
    assert rows[0]["tools"] == rows[1]["tools"] == [tool] and rows[0]["prompt"] == [USER]
    assert [line["score"] for line in rows[0]["log"]] == [None, 1, 2] and "function" in rows[0]["log"][2]
    assert rows[0]["extra"] == {"function": None, "split": "a"} and rows[1]["extra"]["split"] is None


def test_every_null_of_a_line_stays(tmp_path):
    row = {"prompt": [USER | {"name": None, "parts": [None, {"a": None}]}], "tools": [{"function": {"strict": None}}]}
    assert [source for _, source in iterate_rows(write(tmp_path, row, row | {"messages": [{"role": None}]}))] == [
        row,
        row | {"messages": [{"role": None}]},
    ]


def test_a_part_of_text_with_a_null_beside_it_is_text(tmp_path, tokenizer):
    """As rows of one form for text and images have it; the row itself keeps the null."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:"
    prompt = [{"role": "user", "content": [{"type": "text", "text": "1+1=", "image": None}]}]
    path = write(tmp_path, {"prompt": prompt, "answer": "2"})
    check_rows(path, DATA)
    (row,) = read_rows(path, tokenizer, DATA).rows
    assert row.prompt == "user:1+1=;a:" and row.source["prompt"] == prompt
    assert row.messages == ({"role": "user", "content": [{"type": "text", "text": "1+1="}]},)


def test_a_prompt_of_another_name_is_a_chat_too(tmp_path):
    chats = [[USER], [USER | {"name": "Bo"}]]
    path = write_parquet(tmp_path, *({"ask": chat, "log": chat} for chat in chats))
    rows = [source for _, source in iterate_rows(path, "ask")]
    assert [row["ask"] for row in rows] == chats and rows[0]["log"] == [USER | {"name": None}]


def test_a_data_set_gives_plain_values(tmp_path, tokenizer):
    """Whatever form its owner chose to read it in, and undecoded where a column holds images."""
    from datasets import Array2D, Dataset, Features, Image, Json, List, Value

    image = {"bytes": b"no image at all", "path": None}
    columns = {"prompt": Value("string"), "answer": Value("string"), "grid": Array2D((2, 2), "float32")}
    columns |= {"tools": List(Json()), "image": Image(), "more": List(Image())}
    row = ROW | {"grid": [[1.0, 2.0], [3.0, 4.0]], "tools": [{"a": 1}, {"b": "x"}], "image": image, "more": [image]}
    dataset = Dataset.from_list([row], features=Features(columns))
    dataset.set_format("numpy", columns=["prompt"])
    dataset.save_to_disk(tmp_path / "saved")
    (read,) = read_rows(str(tmp_path / "saved"), tokenizer, DATA).rows
    assert read.source == row and (read.prompt, read.answer) == ("1+1=", "2")
    assert type(read.prompt) is str and type(read.source["grid"][1][0]) is float


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "2"}, 'line 2: field "prompt" is missing or empty, the row has answer; it must be text or'),
        ({"prompt": "", "answer": "2"}, 'line 2: field "prompt" is missing or empty'),
        ({"prompt": [], "answer": "2"}, 'line 2: field "prompt" is missing or empty'),
        ({"prompt": "1+1="}, 'line 2: field "answer" must be text, got NoneType, the row has prompt; make it text or'),
        ({"prompt": "1+1=", "answer": 2}, 'line 2: field "answer" must be text, got int'),
        ({"prompt": 7, "answer": "2"}, 'line 2: field "prompt" must be text or a list of messages, got 7'),
        ({"prompt": [USER, {"role": "u"}], "answer": "2"}, "field \"prompt\", message 1 (from 0), of role 'u', must"),
        ({"prompt": [{"role": "u", "content": ["x"]}], "answer": "2"}, "got ['x']; write a result of another type as"),
        ({"prompt": [USER, TOLD], "answer": "2"}, "of role 'tool', must have content of text or parts"),
        ({"prompt": [{"role": "u", "content": 4}], "answer": "2"}, '"video"}, got 4; write'),
        ({"prompt": ["1+1="], "answer": "2"}, 'message 0 (from 0) must be {"role": text, "content": text or parts},'),
        ({"prompt": json.dumps([USER]), "answer": "2"}, 'line 2: field "prompt" has messages as the text of JSON, got'),
        ({"prompt": "1\ud800", "answer": "2"}, 'line 2: field "prompt" is no valid Unicode text'),
        ({"prompt": [{"role": "u", "content": "\udfff"}], "answer": "2"}, 'line 2: field "prompt" is no valid Unicode'),
        ({"prompt": "1", "answer": "\ud800"}, 'line 2: field "answer" is no valid Unicode text'),
        ("{broken", "line 2: not JSON: Expecting property name"),
        ('{"prompt": ' + "9" * 5000 + "}", "line 2: not JSON: Exceeds the limit"),
        ("[1]", "line 2: expected an object, got list"),
        ('"text"', "line 2: expected an object, got str"),
    ],
)
def test_a_broken_row_is_named_without_a_tokenizer(tmp_path, row, message):
    said = message_of(check_rows, write(tmp_path, ROW, row), DATA)
    assert said.startswith("data: ") and "rows.jsonl, line 2: " in said and message in said


def test_messages_need_a_template(tmp_path, tokenizer):
    path = write(tmp_path, ROW, {"prompt": [{"role": "u", "content": "x"}], "answer": "2"})
    said = message_of(read_rows, path, tokenizer, DATA)
    assert 'line 2: field "prompt" has messages, but the tokenizer has no chat template' in said
    tokenizer.chat_template = "{{ raise_exception('no role ' + messages[0].role) }}"
    said = message_of(read_rows, path, tokenizer, DATA)
    assert 'line 2: field "prompt": the chat template refuses these messages: no role u' in said
    for template, message in (("+ messages[0].name", ""), ("+ 1", "can only concatenate str")):
        tokenizer.chat_template = f"{{{{ messages[0].content {template} }}}}"
        said = message_of(read_rows, path, tokenizer, DATA)
        assert f'line 2: field "prompt": the chat template refuses these messages: {message}' in said


def test_an_instruction_makes_a_message_of_a_text(tmp_path, tokenizer):
    data = replace(DATA, instruction="Say it.", max_prompt_tokens=30)
    path = write(tmp_path, {"prompt": "1+1=", "answer": "2"})
    said = message_of(read_rows, path, tokenizer, data)
    assert 'field "prompt" would become a message by data.instruction, but the tokenizer has no chat template' in said
    assert said.endswith('set --data.instruction ""')
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    (row,) = read_rows(path, tokenizer, data).rows
    assert row.prompt == "user: 1+1=\n\nSay it.;"
    path = write(tmp_path, {"prompt": [{"role": "u", "content": "x"}], "answer": "2"})
    assert "has messages, but data.instruction is added only to prompts" in message_of(check_rows, path, data)


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b'\n{"prompt": "caf\xe9", "answer": "2"}\n')
    said = message_of(check_rows, str(path), DATA)
    assert re.search(r"rows\.jsonl, line 2: not UTF-8: .* position 15.*save the file as UTF-8", said)


@pytest.mark.parametrize("form", [write_parquet, save])
def test_a_broken_row_of_a_table_is_named(tmp_path, form):
    said = message_of(check_rows, form(tmp_path, *[ROW] * 1100, {"prompt": None, "answer": "2"}), DATA)
    assert f"{tmp_path}/" in said and 'row 1100 (from 0): field "prompt" is missing or empty' in said


@pytest.mark.parametrize("form", [write_parquet, save])
def test_a_missing_column_is_named_beside_those_there(tmp_path, form):
    path = form(tmp_path, {"question": "1+1=", "answer": "2"})
    said = message_of(check_rows, path, DATA)
    assert 'field "prompt" is missing or empty, the row has question, answer; it must be' in said
    assert "row 0 (from 0)" in said and "--data.prompt-field" in said
    said = message_of(check_rows, path, DataConfig(prompt_field="question", answer_field="solution"))
    assert 'field "solution" must be text, got NoneType, the row has question, answer' in said
    check_rows(path, DataConfig(prompt_field="question"))


def test_shards_of_parquet_are_read_in_their_order(tmp_path, tokenizer):
    """From a folder or a pattern; never two splits as one, and a broken row is named in its own file."""
    import pyarrow as pa
    from pyarrow import parquet

    def write_shard(name: str, *answers: str | None) -> None:
        rows = [{"prompt": f"{answer}=", "answer": answer} for answer in answers]
        (tmp_path / name).parent.mkdir(exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / name)

    def read_answers(path: Path | str) -> list[str]:
        check_rows(str(path), DATA)
        return [row.answer for row in read_rows(str(path), tokenizer, DATA).rows]

    write_shard("shards/train-00001-of-00002-a1b2.parquet", "3")
    write_shard("shards/train-00000-of-00002-c3d4.parquet", "1", "2")
    (tmp_path / "shards" / "README.md").write_text("rows")
    assert read_answers(tmp_path / "shards") == ["1", "2", "3"]
    write_shard("shards/test-00000-of-00001.parquet", "4")
    assert read_answers(f"{tmp_path}/shards/train-*.parquet") == ["1", "2", "3"]
    assert read_answers(f"{tmp_path}/s*/test-*") == ["4"]
    said = message_of(check_rows, f"{tmp_path}/shards", DATA)
    assert "the folder has parquet files of test, train, expected those of one split; name them by a pattern" in said
    assert "does not exist; set --data.train" in message_of(check_rows, f"{tmp_path}/shards/none-*.parquet", DATA)
    write_shard("shards/train-00002-of-00003.parquet", "5", None)
    said = message_of(check_rows, f"{tmp_path}/shards/train-*.parquet", DATA)
    assert said.startswith(f"data: {tmp_path}/shards/train-00002-of-00003.parquet, row 1 (from 0)"), said
    assert find_base_folder(f"{tmp_path}/s*/train-*") == tmp_path and find_base_folder("*.parquet") == Path()


def test_a_parquet_file_that_cannot_be_read(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    path.write_text(json.dumps(ROW))
    said = message_of(check_rows, str(path), DATA)
    assert re.search(r"rows\.parquet: cannot be read as a parquet file: .*magic bytes", said)
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(np.array([0, 1], "i4")), pa.py_buffer(b"\xe9")])
    parquet.write_table(pa.table({"prompt": broken, "answer": ["2"]}), path)
    said = message_of(check_rows, str(path), DATA)
    assert re.search(r"rows\.parquet: cannot be read as a parquet file: .*UTF8", said)
    empty = pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())})
    parquet.write_table(empty, path)
    assert "rows.parquet has no rows" in message_of(check_rows, str(path), DATA)


def test_long_prompts_are_an_error_or_skipped_and_counted(tmp_path, tokenizer):
    path = write(tmp_path, ROW, {"prompt": "1" * 30, "answer": "2"}, {"prompt": "1" * 21, "answer": "3"}, ROW)
    said = message_of(read_rows, path, tokenizer, DATA)
    assert 'line 2: field "prompt" has 30 tokens, expected 1 to 20' in said and "--data.skip-long-prompts" in said
    read = read_rows(path, tokenizer, DataConfig(max_prompt_tokens=20, skip_long_prompts=True))
    assert [row.source for row in read.rows] == [ROW, ROW] and read.skipped == 2
    read = read_rows(path, tokenizer, DataConfig(max_prompt_tokens=21, skip_long_prompts=True))
    assert [row.answer for row in read.rows] == ["2", "3", "2"] and read.skipped == 1
    said = message_of(read_rows, path, tokenizer, DataConfig(max_prompt_tokens=3, skip_long_prompts=True))
    assert "rows.jsonl: all 4 prompts are longer than 3 tokens, the shortest has 4; raise --data.max-prompt" in said


def test_a_prompt_without_tokens_is_an_error_even_where_long_ones_are_skipped(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ '' }}"
    path = write(tmp_path, {"prompt": [{"role": "u", "content": "x"}], "answer": "2"})
    said = message_of(read_rows, path, tokenizer, DataConfig(max_prompt_tokens=20, skip_long_prompts=True))
    assert 'line 1: field "prompt" has 0 tokens, expected 1 to 20' in said


def test_no_file_and_no_rows(tmp_path):
    assert "none.jsonl' does not exist; set --data.train" in message_of(check_rows, str(tmp_path / "none.jsonl"), DATA)
    assert "none.parquet' does not exist" in message_of(check_rows, str(tmp_path / "none.parquet"), DATA)
    assert "none:train' does not exist" in message_of(check_rows, str(tmp_path / "none:train"), DATA)
    assert "no rows were given; set --data.train" in message_of(check_rows, "", DATA)
    assert "rows.jsonl has no rows" in message_of(check_rows, write(tmp_path, "", " "), DATA)


def test_a_saved_dict_takes_a_split(tmp_path, tokenizer):
    from datasets import Dataset, DatasetDict

    splits = {"train": Dataset.from_list([ROW]), "test": Dataset.from_list([{"prompt": "2+2=", "answer": "4"}])}
    folder = tmp_path / "a:b"  # what exists is meant as a whole
    DatasetDict(splits).save_to_disk(folder)
    assert [row.prompt for row in read_rows(f"{folder}:train", tokenizer, DATA).rows] == ["1+1="]
    assert [row.answer for row in read_rows(f"{folder}:test", tokenizer, DATA).rows] == ["4"]
    said = message_of(check_rows, str(folder), DATA)
    assert f"no split was given, there are train, test; choose one, such as {folder}:train" in said
    said = message_of(check_rows, f"{folder}:dev", DATA)
    assert f"{folder}:dev: no split 'dev', there are train, test; choose one" in said


def test_a_saved_data_set_has_no_splits(tmp_path):
    assert "saved has no splits; give the folder alone" in message_of(check_rows, save(tmp_path, ROW) + ":train", DATA)
    (tmp_path / "saved" / "data-00000-of-00001.arrow").write_bytes(b"ARROW, but not really")
    said = message_of(check_rows, str(tmp_path / "saved"), DATA)
    assert "saved: cannot be loaded as a folder of datasets.save_to_disk: ArrowInvalid: " in said
    said = message_of(check_rows, str(tmp_path), DATA)
    assert f"{tmp_path}: cannot be loaded as a folder of datasets.save_to_disk: FileNotFoundError: Directory" in said


def test_a_named_data_set(tmp_path, tokenizer, monkeypatch):
    """A folder ``owner/name`` is what the library takes in place of the hub's."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for name, answers in (("easy", "123"), ("hard", "4"), ("easy_test", "56")):
        rows = [json.dumps({"question": f"{a}+0=", "answer": a}) + "\n" for a in answers]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    splits = "[{split: train, path: easy.jsonl}, {split: test, path: easy_test.jsonl}]"
    configs = (
        f"[{{config_name: easy, default: true, data_files: {splits}}}, {{config_name: hard, data_files: hard.jsonl}}]"
    )
    (folder / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    data = DataConfig(prompt_field="question")
    answers = {"name:train": "123", "name:test": "56", "name/easy:train[:2]": "12", "name/hard:train": "4"}
    for name, want in answers.items():
        assert [row.answer for row in read_rows(f"hf:owner/{name}", tokenizer, data).rows] == list(want)
    said = message_of(check_rows, "hf:owner/name:dev", data)
    assert "data: hf:owner/name:dev: cannot be loaded as hf:OWNER/NAME:SPLIT" in said and "Unknown split" in said
    said = message_of(check_rows, "hf:owner/name/none:train", data)
    assert "BuilderConfig 'none' not found. Available: ['easy', 'hard']" in said
    assert "hf:owner/none:train: cannot be loaded as" in message_of(check_rows, "hf:owner/none:train", data)
    said = message_of(check_rows, "hf:owner/name:test", DATA)
    assert 'hf:owner/name:test, row 0 (from 0): field "prompt" is missing or empty, the row has question' in said


@pytest.mark.parametrize(
    "path", ["hf:owner/name", "hf:owner/name:", "hf:name:train", "hf:a/b/c/d:train", "hf:a//c:train"]
)
def test_a_name_of_another_form_is_refused(path):
    assert f"data: {path}: expected hf:OWNER/NAME:SPLIT or hf:OWNER/NAME/CON" in message_of(check_rows, path, DATA)


def test_fields_must_have_names():
    assert "prompt_field must not be empty" in message_of(lambda: DataConfig(prompt_field=""))
    assert "answer_field must not be empty" in message_of(lambda: DataConfig(answer_field=""))


def test_steps_walk_whole_epochs_in_new_orders():
    rows = list(range(10))
    seen = [row for step in range(5) for row in pick_rows(rows, 4, 4 * step, seed=1)]
    first, second = seen[:10], seen[10:]
    assert sorted(first) == sorted(second) == rows and first != second
    assert pick_rows(rows, 4, 8, seed=1) == seen[8:12], "a step may straddle two epochs and needs no state"
    assert pick_rows(rows, 4, 0, seed=2) != seen[:4]


def test_heldout_additions_are_apart_and_without_pattern(tmp_path):
    folder = make_data(tmp_path)
    train, heldout = ([json.loads(line) for line in (folder / f"{name}.jsonl").open()] for name in ("train", "heldout"))
    prompts = [{row["prompt"] for row in rows} for rows in (train, heldout)]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 10_000
    assert 900 < len(heldout) < 1100
    assert all(sum(map(int, row["prompt"][:-1].split("+"))) == int(row["answer"]) for row in heldout)
    ends = [sum(is_heldout(a, b) for a in range(100) for b in range(100) if (a + b) % 10 == end) for end in range(10)]
    assert min(ends) > 60, "every last digit is held out about as often"


def test_tokens_that_the_model_does_not_have_are_named():
    texts, ids = ["ab", "cd"], [(5, 9), (5, 10)]
    check_vocabulary(texts, ids, vocab=11)
    with pytest.raises(ValueError, match="prompt 'cd' has token 10, the model has 10 tokens"):
        check_vocabulary(texts, ids, vocab=10)


STOPS = [(None, (2,)), (2, (2,)), ([1, 106], (2, 1, 106)), (106, (2, 106))]


@pytest.mark.parametrize(("named", "stops"), STOPS)
def test_answers_end_with_what_configs_name_too(tmp_path, named, stops):
    """``generation_config.json``, or in its stead ``config.json``, of a vision-language model that of its text."""
    tokenizer, folder = make_tokenizer(), str(tmp_path)
    assert list_stop_tokens(folder, tokenizer, 128) == (2,), "a folder may have no generation_config.json"
    for name, config in (
        ("config.json", {"text_config": {"eos_token_id": named}}),
        ("config.json", {"eos_token_id": named, "text_config": {"eos_token_id": 7}} if named else {}),
        ("generation_config.json", {"eos_token_id": named}),
    ):
        (tmp_path / name).write_text(json.dumps(config))
        assert list_stop_tokens(folder, tokenizer, 128) == stops
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert list_stop_tokens(folder, tokenizer, 128) == (stops if named else (2, 7, 8))


def test_an_end_that_the_model_does_not_have_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 128]}))
    with pytest.raises(ValueError, match=r"generation_config.json' has eos_token_id 128, the model has 128 tokens"):
        list_stop_tokens(str(tmp_path), make_tokenizer(), 128)
    with pytest.raises(ValueError, match="the tokenizer's eos token is 2, the model has 2 tokens"):
        list_stop_tokens(str(tmp_path / "none"), make_tokenizer(), 2)


def test_answers_end_with_what_the_chat_template_writes(tmp_path):
    """As those of a base model do, whose configs do not name it."""
    tokenizer = make_tokenizer("{% for m in messages %}<im>{{ m.content }}<end>\n{% endfor %}", ("<im>", "<end>"))
    assert list_stop_tokens(str(tmp_path), tokenizer, 128) == (2, tokenizer.convert_tokens_to_ids("<end>"))
    assert list_stop_tokens(str(tmp_path), tokenizer, 99) == (2,), "the model has no such token"
    for template in ("{{ raise_exception('no') }}", "{% for m in messages %}{{ m.content }}{% endfor %}", "<im>"):
        tokenizer.chat_template = template
        assert list_stop_tokens(str(tmp_path), tokenizer, 128) == (2,)


def test_sampled_text_keeps_its_spaces(tmp_path):
    """Whatever the tokenizer's folder asks to tidy, rewards and parsers of tool calls see what was sampled."""
    make_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clean_up_tokenization_spaces": True}))
    tokenizer, text = load_tokenizer(str(tmp_path)), "1 , 2 ? It 's"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=True) == "1, 2? It's"
    assert [Codec(tokenizer).decode(ids), *tokenizer.batch_decode([ids], skip_special_tokens=True)] == [text, text]


@pytest.mark.parametrize("text", ["[1]", "{", '{"eos_token_id": "end"}', '{"eos_token_id": [1, null]}'])
def test_a_broken_generation_config_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"model: .*generation_config.json. (cannot be read|has eos_token_id)"):
        list_stop_tokens(str(tmp_path), make_tokenizer(), 128)
