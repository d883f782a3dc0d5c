"""Sources of rows: JSONL files, and tables of several kinds (``tables.py``)."""

import codecs
import json
import re
from collections.abc import Iterator
from glob import glob, has_magic
from itertools import takewhile
from pathlib import Path

from rlworker.data.chat.messages import CHAT_FIELDS

_SAVED = ("dataset_dict.json", "state.json")
"""Files in a folder that ``datasets`` wrote by ``save_to_disk``."""


def find_base_folder(path: str) -> Path:
    """Return the folder from which relative paths in rows start.

    It is the folder of the rows' file, the folder of rows itself, the part of a pattern before its first wildcard, or
    for a data set of the hub the working directory.
    """
    if path.startswith("hf:"):
        return Path()
    if Path(path).is_file():
        return Path(path).parent
    if has_magic(path) and not Path(path).exists():
        return Path(*takewhile(lambda part: not has_magic(part), Path(path).parts))
    return Path(path) if Path(path).is_dir() else Path(path.rpartition(":")[0])


def iterate_rows(path: str, prompt_field: str = CHAT_FIELDS[0]) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a source as ``(place, row)``; ``DataConfig.train`` lists the kinds of sources.

    A place names the source, and the row of a table from 0, or the line of a file from 1. Of a table the messages and
    tools lack the keys that the table filled up with nulls.

    Args:
        prompt_field: ``DataConfig.prompt_field``.

    Raises:
        ValueError: the source is missing or cannot be read.
    """
    if not path:
        raise ValueError("data: no rows were given; set --data.train, such as --data.train train.jsonl")
    if Path(path).is_file() and not path.endswith(".parquet"):
        yield from _read_lines(path)
    else:
        from rlworker.data.tables import iterate_tables  # rows of JSONL load nothing of it

        yield from iterate_tables(path, list_files(path), {prompt_field, *CHAT_FIELDS})


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


def list_files(path: str) -> list[str]:
    """Return the JSONL or parquet files with the rows at ``path``; empty for a data set of the hub or a saved one."""
    if path.startswith("hf:"):
        return []
    return [path] if Path(path).is_file() else _list_shards(path)


def _list_shards(path: str) -> list[str]:
    """List the parquet files of a path (a file, a folder or a pattern) by name; empty for other paths.

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
