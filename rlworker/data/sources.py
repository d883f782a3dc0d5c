"""Rows from where they are kept: JSONL and parquet files, saved data sets and those of the HuggingFace hub."""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from glob import glob, has_magic
from itertools import takewhile
from pathlib import Path
from typing import Any

from rlworker.config.sections import DataConfig

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Endings of images' files."""

_BATCH = 100
"""Rows of a table that become Python values at once; they may hold images."""

_CHAT_KEYS = {"role", "function"}
"""A message has the one, a tool's schema the other."""

_SAVED = ("dataset_dict.json", "state.json")
"""Files of a folder that datasets.save_to_disk wrote."""

_Table = tuple[list[str], Iterator[dict]]
"""Names of a table's columns, and its rows."""


def find_base_folder(path: str) -> Path:
    """Find where paths within the rows at ``path`` start: their file's folder, their own, or the working directory;
    of a pattern of files the part before its first wildcard."""
    if path.startswith("hf:"):
        return Path()
    if Path(path).is_file():
        return Path(path).parent
    if has_magic(path) and not Path(path).exists():
        return Path(*takewhile(lambda part: not has_magic(part), Path(path).parts))
    return Path(path) if Path(path).is_dir() else Path(path.rpartition(":")[0])


def iterate_rows(path: str, data: DataConfig | None = None) -> Iterator[tuple[str, dict]]:
    """Iterate over the rows at ``path``, which ``DataConfig.train`` describes, after where it stands. Rows of a table
    count from 0, lines of a file from 1.

    Args:
        data: names the columns that a table must have for prompts and answers; without it any will do.

    Raises:
        ValueError: there are no rows, or they cannot be read.
    """
    if not path:
        raise ValueError("data: no rows were given; set --data.train, such as --data.train train.jsonl")
    if path.startswith("hf:"):
        yield from _number_rows(path, _read_hub(path), data)
    elif shards := _list_shards(path):
        for shard in shards:
            yield from _number_rows(shard, _read_parquet(shard), data)
    elif Path(path).is_file():
        yield from _read_lines(path)
    else:
        yield from _number_rows(path, _read_saved(path), data)


def _read_lines(path: str) -> Iterator[tuple[str, dict]]:
    """Iterate over the objects of a JSONL file, after where it stands."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)  # as editors on Windows write it
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


def _number_rows(path: str, table: _Table, data: DataConfig | None) -> Iterator[tuple[str, dict]]:
    """Iterate over the rows of a table, after where it stands; the columns that ``data`` names must be there.

    Messages and tools come as JSON has them: a table gives each the keys of all, null where there are none.
    """
    columns, rows = table
    names = (("prompt-field", data.prompt_field), ("answer-field", data.answer_field)) if data else ()
    for option, name in names:
        if name not in columns:
            raise ValueError(
                f'data: {path}: no column "{name}", there are {", ".join(columns)}; name one with --data.{option}'
            )
    for number, row in enumerate(rows):
        plain = {name: _drop_nulls(value) if _is_chat(value) else value for name, value in row.items()}
        yield f"data: {path}, row {number} (from 0)", plain


def _is_chat(value: Any) -> bool:
    """Tell whether a field holds messages or the schemas of tools."""
    return isinstance(value, list) and any(isinstance(each, dict) and _CHAT_KEYS & each.keys() for each in value)


def _drop_nulls(value: Any) -> Any:
    """Drop keys without a value at any depth; the content of a message stays, which is null beside calls of tools."""
    if isinstance(value, list):
        return [_drop_nulls(each) for each in value]
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if each is not None or (key == "content" and "role" in value)}
        return {key: _drop_nulls(each) for key, each in kept.items()}
    return value


def list_files(path: str) -> list[str]:
    """List the files that have the rows at ``path`` and nothing else: JSONL or parquet; none for a data set."""
    if path.startswith("hf:"):
        return []
    return [path] if Path(path).is_file() else _list_shards(path)


def _list_shards(path: str) -> list[str]:
    """List the parquet files of which a path is one, the folder, or the pattern, by name; none where it is neither.

    Raises:
        ValueError: the folder has files of several splits.
    """
    place = Path(path)
    if place.is_file():
        return [path] if path.endswith(".parquet") else []
    if not place.is_dir():
        names = glob(path, recursive=True) if has_magic(path) else []
        return sorted(name for name in names if name.endswith(".parquet"))
    if any((place / name).exists() for name in _SAVED):
        return []
    names = sorted(file.name for file in place.glob("*.parquet"))
    if len(splits := sorted({re.split(r"[-_.]?\d|\.parquet", name)[0] for name in names})) > 1:
        raise ValueError(
            f"data: {path}: the folder has parquet files of {', '.join(splits)}, expected those of one split; name "
            f"them by a pattern, such as '{place / splits[0]}*.parquet'"
        )
    return [str(place / name) for name in names]


def _read_parquet(path: str) -> _Table:
    """Iterate over the rows of a parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    @contextmanager
    def readable() -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"data: {path}: cannot be read as a parquet file: {error}") from None

    def rows() -> Iterator[dict]:
        with readable():
            for batch in file.iter_batches(_BATCH):
                batch.validate(full=True)  # text that is no UTF-8
                yield from batch.to_pylist()

    with readable():
        file = parquet.ParquetFile(path)
    return file.schema_arrow.names, rows()


def _read_saved(path: str) -> _Table:
    """Iterate over ``FOLDER`` or ``FOLDER:SPLIT``, as ``save_to_disk`` of a Dataset or a DatasetDict wrote it."""
    folder, split = (path, "") if Path(path).is_dir() else path.rpartition(":")[::2]
    if not Path(folder).is_dir() or not folder:
        raise ValueError(
            f"data: {path!r} does not exist; set --data.train and --data.heldout to a JSONL or parquet file, a folder "
            "or pattern of parquet files, a folder of datasets.save_to_disk (FOLDER or FOLDER:SPLIT) or "
            "hf:OWNER/NAME:SPLIT"
        )
    splits = Path(folder) / "dataset_dict.json"
    if splits.is_file():
        names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
        if split not in names:
            got = f"no split {split!r}" if split else "no split was given"
            raise ValueError(
                f"data: {path}: {got}, there are {', '.join(names)}; choose one, such as {folder}:{names[0]}"
            )
    elif split:
        raise ValueError(f"data: {path}: {folder} has no splits; give the folder alone")
    from datasets import load_from_disk

    return _read_dataset(path, partial(load_from_disk, str(Path(folder, split))), "a folder of datasets.save_to_disk")


def _read_hub(path: str) -> _Table:
    """Iterate over ``hf:OWNER/NAME:SPLIT`` or ``hf:OWNER/NAME/CONFIG:SPLIT``."""
    form = "hf:OWNER/NAME:SPLIT or hf:OWNER/NAME/CONFIG:SPLIT"
    name, _, split = path.removeprefix("hf:").partition(":")
    owner, *rest = name.split("/")
    if not split or len(rest) not in (1, 2) or not all((owner, *rest)):
        raise ValueError(f"data: {path}: expected {form}, such as hf:openai/gsm8k/main:train")
    from datasets import load_dataset

    return _read_dataset(path, partial(load_dataset, f"{owner}/{rest[0]}", *rest[1:], split=split), form)


def _read_dataset(path: str, load: Callable, expected: str) -> _Table:
    """Iterate over the Dataset that ``load`` loads: plain Python values, images and sounds as their bytes."""
    from datasets import Features

    try:
        dataset = load()
    except Exception as error:  # each kind of file and each way to the hub fails with errors of its own
        raise ValueError(f"data: {path}: cannot be loaded as {expected}: {type(error).__name__}: {error}") from error
    features = Features.from_dict(json.loads(json.dumps(dataset.features.to_dict()), object_hook=_skip_decoding))
    batches = dataset.with_format("arrow").iter(batch_size=_BATCH)  # whatever form its owner set
    return dataset.column_names, (features.decode_example(row) for batch in batches for row in batch.to_pylist())


def _skip_decoding(feature: dict) -> dict:
    """Return a feature's description with its decoder off; that of Json stays on, for it gives plain values."""
    if isinstance(kind := feature.get("_type"), str) and "feature" not in feature:  # neither a struct nor a list
        return feature | {"decode": kind == "Json"}  # a kind without a decoder drops the key
    return feature


def refuse_other_fields(source: dict, where: str, data: DataConfig) -> None:
    """Raise ValueError where a row seems to have images, in another field than the one that is asked for."""
    for name, value in source.items():
        if name in (data.image_field, data.video_field, data.prompt_field, data.answer_field):
            continue
        first = value[0] if isinstance(value, list) and value else value
        is_image = isinstance(first, dict) and isinstance(first.get("bytes"), bytes)
        if is_image or (isinstance(first, str) and first.lower().endswith(_ENDINGS)):
            raise ValueError(
                f'{where}: field "{name}" seems to have images, and no row has any in "{data.image_field}"; name the '
                f"field with --data.image-field {name}, or leave it out of rows that are text alone"
            )
