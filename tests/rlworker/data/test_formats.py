"""Rows as verl and TRL write them: what is asked, what is the answer, what is learned, and what is refused."""

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal

import pytest
from support.environments.rows import (
    ASK,
    CALL,
    CALLS,
    SAY,
    TOOL,
    learn,
    make_generation_tokenizer,
    message_of,
    save,
    write,
    write_parquet,
)
from support.environments.tokenizers import make_tokenizer

from rlworker.config.sections import DataConfig
from rlworker.data.conversations import check_examples
from rlworker.data.formats import iterate_formatted
from rlworker.data.rows import check_rows, read_rows

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [ASK],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0, "answer": "48 + 24 = 72 #### 72", "question": ASK["content"]},
}
CHAT = "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
TRUTHS = [
    ("72", "72"),
    (72, "72"),
    (0.5, "0.5"),
    ({"target": ["a", "b"]}, '{"target": ["a", "b"]}'),
    ([1, 2], "[1, 2]"),
]


@pytest.fixture
def tokenizer():
    return make_tokenizer("qwen")


@pytest.mark.parametrize("form", [write, write_parquet, save])
@pytest.mark.parametrize("kind", ["auto", "verl"])
def test_verls_rows_have_their_ground_truth_for_an_answer_and_keep_the_rest(tmp_path, tokenizer, form, kind):
    other = VERL | {"reward_model": {"style": "rule", "ground_truth": "8"}}
    path, data = form(tmp_path, VERL, other), DataConfig(format=kind)
    check_rows(path, data)
    rows = read_rows(path, tokenizer, data).rows
    assert [row.answer for row in rows] == ["72", "8"]
    assert rows[0].messages == (ASK,) and rows[0].prompt == CHAT
    assert {name: rows[0].source[name] for name in VERL} == VERL, "reward functions read all of it"


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (Decimal("72.50"), "72.50"),
        (Decimal("1E+3"), "1000"),
        (date(2024, 1, 5), "2024-01-05"),
        (datetime(2024, 1, 5, 7, 30), "2024-01-05T07:30:00"),
        (time(5, 30), "05:30:00"),
        ({"sum": Decimal("0.5"), "day": date(2024, 1, 5)}, '{"sum": "0.5", "day": "2024-01-05"}'),
    ],
)
def test_a_ground_truth_that_only_tables_have_is_its_text(tmp_path, truth, answer):
    row = VERL | {"reward_model": {"style": "rule", "ground_truth": truth}}
    ((_, read),) = iterate_formatted(write_parquet(tmp_path, row), DataConfig())
    assert read["answer"] == answer


@pytest.mark.parametrize("truth", [timedelta(minutes=5), b"72", [b"72"], float("nan"), {"a": [float("inf")]}])
def test_a_ground_truth_without_a_text_is_refused_with_its_row(tmp_path, truth):
    good = VERL | {"reward_model": {"ground_truth": truth}}
    said = message_of(check_rows, write_parquet(tmp_path, good), DataConfig())
    assert 'rows.parquet, row 0 (from 0): field "reward_model.ground_truth" is or has a value' in said
    assert type(truth).__name__ in said and "make it text or a number" in said
    trl = {"prompt": "5?", "answer": truth, "completion": "5"}
    said = message_of(check_rows, write_parquet(tmp_path, trl), DataConfig(format="trl"))
    assert 'row 0 (from 0): field "answer" is or has a value' in said


@pytest.mark.parametrize(("truth", "answer"), TRUTHS)
def test_a_ground_truth_of_another_type_is_its_json(tmp_path, tokenizer, truth, answer):
    path = write(tmp_path, VERL | {"reward_model": {"ground_truth": truth}})
    (row,) = read_rows(path, tokenizer, DataConfig()).rows
    assert row.answer == answer and row.source["reward_model"]["ground_truth"] == truth


@pytest.mark.parametrize("form", [write, write_parquet])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (None, 'field "reward_model" is None, expected {"ground_truth": ...}'),
        ({"style": "rule", "ground_truth": None}, 'field "reward_model" has style, ground_truth, expected'),
    ],
)
def test_a_row_of_verls_without_its_truth_is_named(tmp_path, form, model, said):
    message = message_of(check_rows, form(tmp_path, VERL, VERL | {"reward_model": model}), DataConfig())
    assert ("line 2: " if form is write else "row 1 (from 0): ") + said in message


def test_rows_with_an_answer_are_read_by_it_unless_a_format_is_named(tmp_path, tokenizer):
    """Auto takes the field that the settings name: rows of verl's may have been given one."""
    path = write(tmp_path, VERL | {"answer": "own", "solution": "other"})
    settings = [DataConfig(), DataConfig(answer_field="solution"), DataConfig(format="verl")]
    assert [read_rows(path, tokenizer, data).rows[0].answer for data in settings] == ["own", "other", "72"]


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "The sky is", "completion": " blue."}, "The sky is", " blue."),
        ({"prompt": [ASK], "completion": [SAY]}, CHAT, SAY["content"]),
    ],
)
def test_rl_takes_a_completion_for_the_answer(tmp_path, tokenizer, row, prompt, answer):
    (found,) = read_rows(write(tmp_path, row), tokenizer, DataConfig()).rows
    assert (found.prompt, found.answer) == (prompt, answer)


def test_rl_takes_prompts_alone_where_trl_is_named_and_their_answer_where_they_have_one(tmp_path, tokenizer):
    path = write(tmp_path, {"prompt": [ASK], "level": 3})
    (row,) = read_rows(path, tokenizer, DataConfig(format="trl")).rows
    assert row.answer == "" and row.source["level"] == 3
    said = message_of(check_rows, path, DataConfig())
    assert 'line 1: field "answer" must be text, got NoneType, the row has prompt, level' in said
    path = write(tmp_path, {"prompt": [ASK], "solution": 7})
    assert read_rows(path, tokenizer, DataConfig(format="trl", answer_field="solution")).rows[0].answer == "7"


@pytest.mark.parametrize(
    ("prompt", "completion", "tools"),
    [
        ([ASK], [SAY], []),
        ([ASK, SAY, ASK], [SAY], []),
        (CALLS[:2], CALLS[2:], [TOOL]),
        ([*CALLS, ASK], [{"role": "assistant", "content": None, "tool_calls": [CALL]}], [TOOL]),
    ],
)
def test_of_prompt_and_completion_the_completion_is_learned(tmp_path, make_hf_model, prompt, completion, tools):
    """As transformers marks it in the whole chat, less what the assistant said in the prompt."""
    tokenizer = make_generation_tokenizer()
    row = {"prompt": prompt, "completion": completion, "tools": tools}
    ((example,), _) = learn(tokenizer, tmp_path, make_hf_model, row)
    options = dict(tools=tools or None, return_dict=True, return_assistant_tokens_mask=True)
    whole = tokenizer.apply_chat_template([*prompt, *completion], **options)
    given = len(tokenizer.apply_chat_template(prompt, **options)["input_ids"])
    assert list(example.ids) == whole["input_ids"]
    marks = [bool(mark) and place >= given for place, mark in enumerate(whole["assistant_masks"])]
    assert example.mark_learned().tolist() == marks and any(marks)


def test_a_system_message_by_option_learns_the_same(tmp_path, make_hf_model):
    tokenizer, row = make_generation_tokenizer(), {"prompt": [ASK, SAY, ASK], "completion": [SAY]}
    ((example,), _) = learn(tokenizer, tmp_path, make_hf_model, row, data=DataConfig(system="Hi there."))
    ((first, end),) = example.turns
    assert tokenizer.decode(example.ids[first:end]).endswith("42.<|im_end|>") and "Hi" in tokenizer.decode(example.ids)


def test_text_and_its_completion_are_learned_as_prompt_and_answer(tmp_path, make_hf_model):
    tokenizer = make_tokenizer("qwen")
    same = [{"prompt": "a = 4", "completion": " ok"}, {"prompt": "a = 4", "answer": " ok"}]
    found = [learn(tokenizer, tmp_path, make_hf_model, row)[0][0] for row in same]
    assert found[0] == found[1] and tokenizer.decode(found[0].ids[found[0].prompt_length :]).startswith(" ok")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, 'field "chosen" makes it a row of preferences'),
        ({"prompt": "a", "completion": "b", "label": True}, 'field "label" makes it a row of preferences'),
        ({"prompt": [ASK], "completion": [SAY], "label": False}, 'field "label" makes it a row of preferences'),
        ({"prompt": "a", "completion": 7}, 'field "completion" must be text or a list of messages, '),
        ({"prompt": [ASK], "completion": []}, 'field "completion" must be '),
        ({"prompt": [ASK], "completion": [ASK]}, 'field "completion" has no message of the assistant'),
        (
            {"prompt": "a", "completion": [SAY]},
            'field "prompt" must be a list of messages, as in the ',
        ),
    ],
)
def test_a_row_of_trls_that_supervised_training_cannot_take_is_named(tmp_path, row, said):
    """The row before it is good."""
    good = {"prompt": [ASK], "completion": [SAY]} if isinstance(row.get("completion"), list) else {}
    good = good or {"prompt": "a", "completion": "b"}
    path = write(tmp_path, good, row) if "chosen" not in row else write(tmp_path, row)
    assert f"line {1 + ('chosen' not in row)}: {said}" in message_of(check_examples, path, DataConfig())


def test_rows_that_leave_nothing_to_learn_are_refused(tmp_path):
    trl = DataConfig(format="trl")
    said = message_of(check_examples, write(tmp_path, {"prompt": "a"}), trl)
    assert 'line 1: field "completion" is missing, the row has prompt; give the completion' in said
    said = message_of(check_rows, write(tmp_path, {"text": "The sky is blue."}), trl)
    assert 'line 1: field "text" alone does not say which part is learned' in said


@pytest.mark.parametrize("form", [write_parquet, save])
def test_a_table_of_trls_drops_the_nulls_that_it_fills_up(tmp_path, form, make_hf_model):
    """A message without calls beside one with some has null for calls, in the completion too."""
    rows = [{"prompt": CALLS[:2], "completion": CALLS[2:], "tools": [TOOL]}, {"prompt": [ASK], "completion": [SAY]}]
    check_examples(form(tmp_path, *json.loads(json.dumps(rows))), DataConfig())
