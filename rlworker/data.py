"""Rows to learn from: JSONL in, tokenised prompts out, and which of them each step takes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import TemplateError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Row:
    """One question.

    Attributes:
        prompt: the text that the model sees, chat template applied.
        prompt_ids: its token ids. answer: what a reward function compares with.
        source: the row as it stands in the file, for reward functions that need more.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    source: dict


def load_tokenizer(folder: str):
    """The tokenizer saved with a model.

    Raises:
        ValueError: there is none, or it has no end-of-sequence token, so that nothing would end an answer.
    """
    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
        # transformers would make an empty tokenizer without a word
        raise ValueError(
            f"model: folder {folder!r} has no tokenizer (one of {', '.join(_TOKENIZER_FILES)}); save it there"
        )
    if (Path(folder) / "tokenizer.json").is_file():
        # The whole tokenizer as it was saved; the class of the model's own name would import torch to read the same.
        from transformers import PreTrainedTokenizerFast as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer
    tokenizer = Tokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model: the tokenizer in {folder!r} has no eos token, so nothing ends an answer; set one")
    return tokenizer


def check_rows(path: str) -> None:
    """Look at every row's fields, which takes no tokenizer.

    Raises:
        ValueError: no such file, or a broken row, by file, line and field.
    """
    if not Path(path).is_file():
        raise ValueError(f"data: file {path!r} does not exist; set --data.train and --data.heldout to JSONL files")
    empty = True
    for where, source in _lines(path):
        _check_fields(where, source)
        empty = False
    if empty:
        raise ValueError(f"data: {path} has no rows")


def read_rows(path: str, tokenizer, max_prompt_tokens: int) -> list[Row]:
    """Read a JSONL file of ``{"prompt": text or messages, "answer": text, ...}``.

    Messages (``[{"role": ..., "content": ...}, ...]``) go through the tokenizer's chat template; text stays as it is.

    Raises:
        ValueError: no such file, or a broken row, by file, line and field.
    """
    check_rows(path)
    places, sources = zip(*_lines(path), strict=True)
    prompts = [(where, source["prompt"]) for where, source in zip(places, sources, strict=True)]
    texts = [p if isinstance(p, str) else _apply_template(p, tokenizer, where) for where, p in prompts]
    rows = []
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for where, source, text, ids in zip(places, sources, texts, encoded, strict=True):
        if not 0 < len(ids) <= max_prompt_tokens:
            raise ValueError(
                f'{where}: field "prompt" has {len(ids)} tokens, expected 1 to {max_prompt_tokens}; shorten it or '
                "raise --data.max-prompt-tokens"
            )
        rows.append(Row(text, tuple(ids), source["answer"], source))
    return rows


def _lines(path: str) -> Iterator[tuple[str, dict]]:
    """Each row, after where it stands."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"data: {path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"data: {path}, line {number}: expected an object, got {type(row).__name__}")
            yield f"data: {path}, line {number}", row


def _check_fields(where: str, source: dict) -> None:
    prompt, answer = source.get("prompt"), source.get("answer")
    if not prompt:
        raise ValueError(f'{where}: field "prompt" is missing or empty; it must be text or a list of messages')
    messages = isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
    )
    if not isinstance(prompt, str) and not messages:
        raise ValueError(f'{where}: field "prompt" must be text or a list of {{"role": text, "content": text}}')
    if not isinstance(answer, str):
        raise ValueError(f'{where}: field "answer" must be text, got {type(answer).__name__}')


def _apply_template(messages: list[dict], tokenizer, where: str) -> str:
    if not tokenizer.chat_template:
        raise ValueError(f'{where}: field "prompt" has messages, but the tokenizer has no chat template; give text')
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:  # templates refuse roles and orders that they do not know
        raise ValueError(f'{where}: field "prompt": the chat template refuses these messages: {error}') from None


def rows_of_step(rows: list[Row], count: int, step: int, seed: int) -> list[Row]:
    """The ``count`` rows that step ``step`` (from 0) takes.

    Epochs follow one another, each in its own order, and a step may straddle two. The choice depends on nothing but
    the arguments, so that a resumed run sees what the uninterrupted one would have.
    """
    taken = []
    for place in range(step * count, (step + 1) * count):
        epoch, index = divmod(place, len(rows))
        if not taken or index == 0:
            order = np.random.default_rng([seed, epoch]).permutation(len(rows))
        taken.append(rows[order[index]])
    return taken
