"""Rows in files of every kind, and chats with calls of tools whose template marks what the assistant says."""

import json
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
from support.environments.tokenizers import make_tokenizer

from engines.models.spec import ModelSpec
from rlworker.config.sections import DataConfig
from rlworker.config.sft import SftConfig
from rlworker.data.conversations import check_examples
from rlworker.data.examples import read_examples
from rlworker.data.images import build_image_reader
from rlworker.data.rows import Row, check_rows, load_tokenizer, read_rows

ASK, SAY = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "The answer is 42."}
CHAT = [ASK, SAY, ASK | {"content": "a = 4"}, SAY | {"content": "ok"}, ASK, SAY | {"content": "Hi, hello"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 4}}}
CALLS = [
    {"role": "system", "content": "Hi there."},
    ASK,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
    SAY,
]
GENERATION = (
    "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template of Qwen's kind that says itself, for transformers, what the assistant says."""


def make_generation_tokenizer():
    tokenizer = copy(make_tokenizer("qwen"))
    tokenizer.chat_template = GENERATION
    return tokenizer


def write(folder, *rows) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def write_parquet(folder, *rows) -> str:
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def save(folder, *rows) -> str:
    from datasets import Dataset

    Dataset.from_list(list(rows)).save_to_disk(folder / "saved")
    return str(folder / "saved")


def learn(tokenizer, folder: Path, make_hf_model, *rows: dict, **settings) -> tuple[list, int]:
    """Read rows as supervised training does, for a text model of the tokenizer's vocabulary: its examples, and how many
    rows were skipped."""
    path, config = write(folder, *rows), SftConfig(**settings)
    check_examples(path, config.data)
    model = replace(ModelSpec.from_folder(make_hf_model("qwen2", True)), vocab=len(tokenizer))
    return read_examples(path, tokenizer, config, model)


def read_shown(model: ModelSpec, data: DataConfig, *rows: dict, folder: Path, limit_mb: int = 64) -> list[Row]:
    """Read rows of a JSONL file in ``folder`` with the images and videos beside it, for a model that sees them."""
    path, reader = write(folder, *rows), build_image_reader(model, str(folder / "run"), limit_mb)
    check_rows(path, data)
    return read_rows(path, load_tokenizer(model.folder), data, reader).rows


def message_of(call, *arguments) -> str:
    with pytest.raises(ValueError) as error:
        call(*arguments)
    return str(error.value)
