"""Rows to learn from: files and data sets in, tokenised prompts out, and which of them each step takes."""

import json
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from jinja2 import TemplateError

from rlworker.config import DataConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

_BATCH = 1000
"""Rows of a table that become Python values at once."""

_Table = tuple[list[str], Iterator[dict]]
"""Names of a table's columns, and its rows."""


@dataclass(frozen=True)
class Row:
    """One question.

    Attributes:
        prompt: the text that the model sees, chat template applied.
        prompt_ids: its token ids. answer: what a reward function compares with.
        source: the whole row in plain Python values, for reward functions that need more.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    source: dict


@dataclass(frozen=True)
class Rows:
    """The rows of one source.

    Attributes:
        skipped: how many were left out because their prompt is too long.
    """

    rows: list[Row]
    skipped: int


def load_tokenizer(folder: str):
    """The tokenizer saved with a model.

    Raises:
        ValueError: there is none that can be read, or it has no end-of-sequence token, so that nothing would end an
            answer.
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
    try:
        tokenizer = Tokenizer.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise ValueError(f"model: the tokenizer in {folder!r} cannot be read ({error}); save it there again") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model: the tokenizer in {folder!r} has no eos token, so nothing ends an answer; set one")
    return tokenizer


def check_vocabulary(texts: Sequence[str], ids: Sequence[Sequence[int]], tokenizer, vocab: int) -> None:
    """Raise ValueError where the tokenizer knows tokens, used here, that the model of ``vocab`` tokens does not.

    Args:
        texts: what the message calls each of ``ids``.
    """
    if tokenizer.eos_token_id >= vocab:
        raise ValueError(f"model: the tokenizer's eos token is {tokenizer.eos_token_id}, the model has {vocab} tokens")
    for text, numbers in zip(texts, ids, strict=True):
        if max(numbers) >= vocab:
            raise ValueError(
                f"data: the row of prompt {text[:80]!r} has token {max(numbers)}, the model has {vocab} tokens; take "
                "the tokenizer that belongs to the model"
            )


def check_rows(path: str, data: DataConfig) -> None:
    """Look at every row's fields, which takes no tokenizer.

    Raises:
        ValueError: there are no such rows, or a broken one, by place, row and field.
    """
    for _ in _checked(path, data):
        pass


def read_rows(path: str, tokenizer, data: DataConfig) -> Rows:
    """Read the rows at ``path``, which ``DataConfig.train`` describes, and tokenise their prompts.

    Messages (``[{"role": ..., "content": ...}, ...]``) go through the tokenizer's chat template; text stays as it is
    where ``data.instruction`` does not make a message of it.

    Raises:
        ValueError: there are no such rows, or a broken one, by place, row and field; a prompt is too long, or all are
            where such are skipped.
    """
    places, sources = zip(*_checked(path, data), strict=True)
    prompts = [(where, source[data.prompt_field]) for where, source in zip(places, sources, strict=True)]
    texts = [_text_of(prompt, tokenizer, where, data) for where, prompt in prompts]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    rows, limit = [], data.max_prompt_tokens
    for where, source, text, ids in zip(places, sources, texts, encoded, strict=True):
        if len(ids) > limit and data.skip_long_prompts:
            continue
        if not 0 < len(ids) <= limit:
            raise ValueError(
                f'{where}: field "{data.prompt_field}" has {len(ids)} tokens, expected 1 to {limit}; change it, raise '
                "--data.max-prompt-tokens or leave long ones out with --data.skip-long-prompts"
            )
        rows.append(Row(text, tuple(ids), source[data.answer_field], source))
    if not rows:
        raise ValueError(
            f"data: {path}: all {len(encoded)} prompts are longer than {limit} tokens, the shortest has "
            f"{min(map(len, encoded))}; raise --data.max-prompt-tokens"
        )
    return Rows(rows, skipped=len(encoded) - len(rows))


def _checked(path: str, data: DataConfig) -> Iterator[tuple[str, dict]]:
    """Each row after where it stands, its fields checked. Rows of a table count from 0, lines of a file from 1."""
    if not path:
        raise ValueError("data: no rows were given; set --data.train, such as --data.train train.jsonl")
    if path.startswith("hf:"):
        rows = _numbered(path, _hub_rows(path), data)
    elif path.endswith(".parquet") and Path(path).is_file():
        rows = _numbered(path, _parquet_rows(path), data)
    elif Path(path).is_file():
        rows = _lines(path)
    else:
        rows = _numbered(path, _saved_rows(path), data)
    empty = True
    for where, source in rows:
        _check_fields(where, source, data)
        yield where, source
        empty = False
    if empty:
        raise ValueError(f"data: {path} has no rows")


def _lines(path: str) -> Iterator[tuple[str, dict]]:
    """Each object of a JSONL file, after where it stands."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"data: {path}, line {number}"
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8: {error}; save the file as UTF-8") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON: {error}; expected an object on each line") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected an object, got {type(row).__name__}")
            yield where, row


def _numbered(path: str, table: _Table, data: DataConfig) -> Iterator[tuple[str, dict]]:
    """Each row of a table, after where it stands; the columns must be there."""
    columns, rows = table
    for option, name in (("prompt-field", data.prompt_field), ("answer-field", data.answer_field)):
        if name not in columns:
            raise ValueError(
                f'data: {path}: no column "{name}", there are {", ".join(columns)}; name one with --data.{option}'
            )
    for number, row in enumerate(rows):
        yield f"data: {path}, row {number} (from 0)", row


def _parquet_rows(path: str) -> _Table:
    """Of a parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path).read()
        table.validate(full=True)  # text that is no UTF-8
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"data: {path}: cannot be read as a parquet file: {error}") from None
    return table.column_names, (row for batch in table.to_batches(_BATCH) for row in batch.to_pylist())


def _saved_rows(path: str) -> _Table:
    """Of ``FOLDER`` or ``FOLDER:SPLIT``, as ``save_to_disk`` of a Dataset or a DatasetDict wrote it."""
    folder, split = (path, "") if Path(path).is_dir() else path.rpartition(":")[::2]
    if not Path(folder).is_dir() or not folder:
        raise ValueError(
            f"data: {path!r} does not exist; set --data.train and --data.heldout to a JSONL or parquet file, a folder "
            "of datasets.save_to_disk (FOLDER or FOLDER:SPLIT) or hf:OWNER/NAME:SPLIT"
        )
    splits = Path(folder) / "dataset_dict.json"
    if splits.is_file():
        known = json.loads(splits.read_text(encoding="utf-8"))["splits"]
        if split not in known:
            got = f"no split {split!r}" if split else "no split was given"
            raise ValueError(
                f"data: {path}: {got}, there are {', '.join(known)}; choose one, such as {folder}:{known[0]}"
            )
    elif split:
        raise ValueError(f"data: {path}: {folder} has no splits; give the folder alone")
    from datasets import load_from_disk

    return _dataset_rows(path, partial(load_from_disk, str(Path(folder, split))), "a folder of datasets.save_to_disk")


def _hub_rows(path: str) -> _Table:
    """Of ``hf:OWNER/NAME:SPLIT`` or ``hf:OWNER/NAME/CONFIG:SPLIT``."""
    form = "hf:OWNER/NAME:SPLIT or hf:OWNER/NAME/CONFIG:SPLIT"
    name, _, split = path.removeprefix("hf:").partition(":")
    owner, *rest = name.split("/")
    if not split or len(rest) not in (1, 2) or not all((owner, *rest)):
        raise ValueError(f"data: {path}: expected {form}, such as hf:openai/gsm8k/main:train")
    from datasets import load_dataset

    return _dataset_rows(path, partial(load_dataset, f"{owner}/{rest[0]}", *rest[1:], split=split), form)


def _dataset_rows(path: str, load: Callable, expected: str) -> _Table:
    """Of the Dataset that ``load`` loads: plain Python values, images and sounds as their bytes."""
    from datasets import Features

    try:
        dataset = load()
    except Exception as error:  # each kind of file and each way to the hub fails with errors of its own
        raise ValueError(f"data: {path}: cannot be loaded as {expected}: {type(error).__name__}: {error}") from error
    features = Features.from_dict(json.loads(json.dumps(dataset.features.to_dict()), object_hook=_undecoded))
    batches = dataset.with_format("arrow").iter(batch_size=_BATCH)  # whatever form its owner set
    return dataset.column_names, (features.decode_example(row) for batch in batches for row in batch.to_pylist())


def _undecoded(feature: dict) -> dict:
    """A feature's description with its decoder off; that of Json stays on, for it gives plain values."""
    if isinstance(kind := feature.get("_type"), str) and "feature" not in feature:  # neither a struct nor a list
        return feature | {"decode": kind == "Json"}  # a kind without a decoder drops the key
    return feature


def _check_fields(where: str, source: dict, data: DataConfig) -> None:
    prompt, answer = source.get(data.prompt_field), source.get(data.answer_field)
    prompt_place, answer_place = (f'{where}: field "{name}"' for name in (data.prompt_field, data.answer_field))
    if not prompt:
        raise ValueError(
            f"{prompt_place} is missing or empty, the row has {', '.join(source)}; it must be text or a list of "
            "messages (another field: --data.prompt-field)"
        )
    is_chat = isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
    )
    if not isinstance(prompt, str) and not is_chat:
        raise ValueError(
            f'{prompt_place} must be text or a list of {{"role": text, "content": text}}, got {reprlib.repr(prompt)}'
        )
    if is_chat and data.instruction:
        raise ValueError(
            f"{prompt_place} has messages, which data.instruction does not go into; write it into them and set "
            '--data.instruction ""'
        )
    if not isinstance(answer, str):
        raise ValueError(
            f"{answer_place} must be text, got {type(answer).__name__}, the row has {', '.join(source)}; make it text "
            "or name another field with --data.answer-field"
        )
    for text in [text for m in prompt for text in (m["role"], m["content"])] if is_chat else [prompt]:
        _check_encodable(prompt_place, text)
    _check_encodable(answer_place, answer)


def _check_encodable(place: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can hold and no tokenizer takes
        raise ValueError(f"{place} is no valid Unicode text: {error}; remove that character") from None


def _text_of(prompt: str | list[dict], tokenizer, where: str, data: DataConfig) -> str:
    if isinstance(prompt, str) and not data.instruction:
        return prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": f"{prompt}\n\n{data.instruction}"}]
    return _apply_template(prompt, tokenizer, where, data)


def _apply_template(messages: list[dict], tokenizer, where: str, data: DataConfig) -> str:
    place = f'{where}: field "{data.prompt_field}"'
    if not tokenizer.chat_template:
        has, remedy = "has messages", "give text"
        if data.instruction:
            has, remedy = "would become a message by data.instruction", 'set --data.instruction ""'
        raise ValueError(f"{place} {has}, but the tokenizer has no chat template; {remedy}")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:  # templates refuse roles and orders that they do not know
        raise ValueError(f"{place}: the chat template refuses these messages: {error}") from None


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
