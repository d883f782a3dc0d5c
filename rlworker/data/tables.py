"""Read tables of rows: parquet files, saved data sets, and data sets of the HuggingFace hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH = 100
"""Number of rows that become Python values at a time, since rows may hold images."""


def iterate_tables(path: str, shards: Sequence[str], chat_fields: Collection[str]) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a table as ``(place, row)``.

    Args:
        path: the source, as ``DataConfig.train`` lists them.
        shards: parquet files at ``path``; empty for a data set of the hub or a saved one.
        chat_fields: fields with messages or tools, of which keys that the table filled up are left out.

    Raises:
        ValueError: a table cannot be read.
    """
    if path.startswith("hf:"):
        tables = [(path, _read_hub)]
    else:
        tables = [(shard, _read_parquet) for shard in shards] or [(path, _read_saved)]
    for name, read in tables:
        yield from _number_rows(name, read(name, chat_fields))


def _drop_filled(row: dict, schema: pa.Schema, chat_fields: Collection[str]) -> dict:
    """Return a row of a table without the keys in its messages and tools that are null because others have a value."""
    kept = {name: _drop_nulls(row[name], schema.field(name).type) for name in row if name in chat_fields}
    return row | kept


def _drop_nulls(value: Any, kind: pa.DataType) -> Any:
    """Drop the keys of objects in a value of an Arrow type that are null.

    A key of which no object has a value was written as null, and stays. So does the content of a message, which is null
    beside tool calls.
    """
    import pyarrow as pa

    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_drop_nulls(each, kind.value_type) for each in value]
    if not isinstance(value, dict) or not pa.types.is_struct(kind):
        return value
    kept = {}
    for key, each in value.items():
        field_kind = kind.field(key).type
        is_content = key == "content" and "role" in value
        if each is not None or is_content or pa.types.is_null(field_kind):
            kept[key] = _drop_nulls(each, field_kind)
    return kept


def _number_rows(path: str, rows: Iterator[dict]) -> Iterator[tuple[str, dict]]:
    """Iterate over the rows of a table, each after its place."""
    for number, row in enumerate(rows):
        yield f"data: {path}, row {number} (from 0)", row


def _read_parquet(path: str, chat_fields: Collection[str]) -> Iterator[dict]:
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
                yield from (_drop_filled(row, batch.schema, chat_fields) for row in batch.to_pylist())

    with readable():
        file = parquet.ParquetFile(path)
    return rows()


def _read_saved(path: str, chat_fields: Collection[str]) -> Iterator[dict]:
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

    load = partial(load_from_disk, str(Path(folder, split)))
    return _read_dataset(path, load, "a folder of datasets.save_to_disk", chat_fields)


def _read_hub(path: str, chat_fields: Collection[str]) -> Iterator[dict]:
    """Iterate over ``hf:OWNER/NAME:SPLIT`` or ``hf:OWNER/NAME/CONFIG:SPLIT``."""
    form = "hf:OWNER/NAME:SPLIT or hf:OWNER/NAME/CONFIG:SPLIT"
    name, _, split = path.removeprefix("hf:").partition(":")
    owner, *rest = name.split("/")
    if not split or len(rest) not in (1, 2) or not all((owner, *rest)):
        raise ValueError(f"data: {path}: expected {form}, such as hf:openai/gsm8k/main:train")
    from datasets import load_dataset

    load = partial(load_dataset, f"{owner}/{rest[0]}", *rest[1:], split=split)
    return _read_dataset(path, load, form, chat_fields)


def _read_dataset(path: str, load: Callable, expected: str, chat_fields: Collection[str]) -> Iterator[dict]:
    """Iterate over the Dataset that ``load`` loads: plain Python values, images and sounds as their bytes."""
    from datasets import Features

    try:
        dataset = load()
    except Exception as error:  # each kind of file and each way to the hub fails with errors of its own
        raise ValueError(f"data: {path}: cannot be loaded as {expected}: {type(error).__name__}: {error}") from error
    # Decoders are off, but for Json's, which gives plain values. A kind without a decoder drops the key. Structs have
    # no _type, and lists a "feature"; neither has a decoder.
    plain = lambda feature: isinstance(feature.get("_type"), str) and "feature" not in feature  # noqa: E731
    skip = lambda feature: feature | ({"decode": feature["_type"] == "Json"} if plain(feature) else {})  # noqa: E731
    features = Features.from_dict(json.loads(json.dumps(dataset.features.to_dict()), object_hook=skip))
    batches = dataset.with_format("arrow").iter(batch_size=_BATCH)  # overrides the format that its owner set
    return (
        _drop_filled(features.decode_example(row), batch.schema, chat_fields)
        for batch in batches
        for row in batch.to_pylist()
    )
