"""A row's ``tools`` stand in its prompt, in rows of RL and in prompts with answers."""

import json

import pytest
from support.environments.forms import FORMS, TOOL
from support.environments.released import RELEASED
from support.environments.rows import learn, write

from rlworker.config.sections import DataConfig
from rlworker.data.rows import read_rows

ASK, _ = FORMS["no thinking"]["messages"]


def read(folder, *rows: dict, name: str = "Qwen3", data: DataConfig | None = None):
    return read_rows(write(folder, *rows), RELEASED[name].make_tokenizer(), data or DataConfig()).rows


@pytest.mark.parametrize("name", ["Qwen3", "Llama 3.1", "Mistral v0.3", "GLM-4.5", "Qwen3.5"])
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_the_prompt_of_a_row_shows_its_tools(tmp_path, name, tools):
    tokenizer = RELEASED[name].make_tokenizer()
    (row,) = read(tmp_path, {"prompt": [ASK], "answer": "4", "tools": tools}, name=name)
    want = tokenizer.apply_chat_template([ASK], tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert row.prompt == want and tokenizer.decode(row.prompt_ids) == want and "Adds two numbers" in want
    assert row.tools == (TOOL,) and row.source["tools"] == tools


def test_rows_without_tools_are_as_before(tmp_path):
    rows = [{"prompt": [ASK], "answer": "4"} | more for more in ({}, {"tools": None}, {"tools": []}, {"tools": ""})]
    prompts = {(row.prompt, row.tools) for row in read(tmp_path, *rows)}
    assert len(prompts) == 1 and prompts.pop()[1] == ()


def test_an_answer_is_learned_behind_the_prompt_that_shows_the_tools(tmp_path, make_hf_model):
    tokenizer = RELEASED["Qwen2.5"].make_tokenizer()
    ((example,), _) = learn(tokenizer, tmp_path, make_hf_model, {"prompt": [ASK], "answer": "4", "tools": [TOOL]})
    messages = [ASK, {"role": "assistant", "content": "4"}]
    whole = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert tokenizer.decode(example.ids) == whole.rstrip()
    assert tokenizer.decode(example.ids[example.prompt_length :]) == "4<|im_end|>"


def test_a_prompt_of_text_shows_tools_once_it_becomes_a_message(tmp_path):
    """As text it has no template that could."""
    row = {"prompt": "1 + 3?", "answer": "4", "tools": [TOOL]}
    assert read(tmp_path, row)[0].prompt == "1 + 3?"
    assert "Adds two numbers" in read(tmp_path, row, data=DataConfig(instruction="Be brief."))[0].prompt


@pytest.mark.parametrize("tools", ["add", ["add"], {"add": 1}, 4, "{}", "[1]"])
def test_what_is_no_list_of_schemas_is_refused_with_the_row(tmp_path, tools):
    row = {"prompt": [ASK], "answer": "4", "tools": tools}
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: field \"tools\" must be a list of JSON schemas"):
        read(tmp_path, row)


def test_a_template_that_reads_no_tools_is_refused_with_the_row(tmp_path):
    row = {"prompt": [ASK], "answer": "4", "tools": [TOOL]}
    with pytest.raises(ValueError, match=r"line 1: field \"prompt\": .* the chat template does not read tools"):
        read(tmp_path, row, name="Gemma 3")


def test_an_answer_goes_on_with_the_prompts_last_message(tmp_path, make_hf_model):
    tokenizer = RELEASED["Qwen2.5"].make_tokenizer()
    prompt = [ASK, {"role": "assistant", "content": "It is"}]
    ((example,), _) = learn(tokenizer, tmp_path, make_hf_model, {"prompt": prompt, "answer": " 4"})
    whole = tokenizer.apply_chat_template([ASK, {"role": "assistant", "content": "It is 4"}], tokenize=False)
    assert tokenizer.decode(example.ids) == whole.rstrip()
    assert tokenizer.decode(example.ids[example.prompt_length :]) == " 4<|im_end|>"
    (row,) = read(tmp_path, {"prompt": prompt, "answer": " 4"}, name="Qwen2.5")
    assert row.prompt.endswith("<|im_start|>assistant\nIt is") and row.messages == tuple(prompt)


def test_an_answer_is_learned_behind_a_shorter_prompt_where_the_template_opens_it_in_another_way(
    tmp_path, make_hf_model
):
    """Qwen3.5's small models are asked behind an empty thought; an answer that has one takes its place."""
    tokenizer = RELEASED["Qwen3.5 small"].make_tokenizer()
    row = {"prompt": [ASK], "answer": "<think>\nHm.\n</think>\n\n4"}
    ((example,), _) = learn(tokenizer, tmp_path, make_hf_model, row)
    assert tokenizer.decode(example.ids).endswith("assistant\n<think>\nHm.\n</think>\n\n4<|im_end|>")
    assert tokenizer.decode(example.ids[example.prompt_length :]) == "Hm.\n</think>\n\n4<|im_end|>"
