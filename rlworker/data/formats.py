"""Read rows in the formats of verl and TRL as rows of this project."""

import json
import reprlib
from collections.abc import Collection, Iterator
from datetime import date, time
from decimal import Decimal
from typing import Any, Literal

from rlworker.config.sections import DataConfig
from rlworker.data.sources import iterate_rows

REWARD_MODEL, TRUTH, COMPLETION = "reward_model", "ground_truth", "completion"
"""Fields of verl's rows, and of TRL's."""
SOURCE = "data_source"
"""Field of a row that names its source, as in verl's rows."""
_PREFERENCES = ("chosen", "rejected", "label")
"""Fields of TRL's rows that compare answers."""

Format = Literal["own", "verl", "trl"]


def find_format(fields: Collection[str], data: DataConfig) -> Format:
    """Find the format of rows by the fields of the first row, unless ``data.format`` names it.

    ``own`` is this project's: it has the answer in the field ``data.answer_field``.
    """
    if data.format != "auto":
        return data.format
    if data.answer_field in fields:
        return "own"
    if REWARD_MODEL in fields:
        return "verl"
    return "trl" if COMPLETION in fields or {"chosen", "rejected"} <= {*fields} else "own"


def iterate_formatted(path: str, data: DataConfig) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a source as ``(place, row)``, each with its answer in ``data.answer_field``.

    All other fields stay as they are.

    Raises:
        ValueError: as for ``iterate_rows``, or a row has no answer where its format has it; the message has place and
            field.
    """
    kind = None
    for where, source in iterate_rows(path, data.prompt_field):
        kind = kind or find_format(source, data)
        if kind == "verl":
            source = source | {data.answer_field: _read_truth(where, source)}
        elif kind == "trl":
            source = source | {data.answer_field: _read_completion(where, source, data)}
        yield where, source


def _read_truth(where: str, source: dict) -> str:
    """Read ``reward_model.ground_truth`` of a row of verl's as text; what is neither text nor a number as JSON's."""
    model = source.get(REWARD_MODEL)
    if not isinstance(model, dict) or model.get(TRUTH) is None:
        got = f"has {', '.join(model)}" if isinstance(model, dict) else f"is {reprlib.repr(model)}"
        raise ValueError(
            f'{where}: field "{REWARD_MODEL}" {got}, expected {{"{TRUTH}": ...}} as in verl\'s rows; give it, or name '
            "the field of the answer with --data.answer-field"
        )
    return spell_answer(model[TRUTH], f'{where}: field "{REWARD_MODEL}.{TRUTH}"')


def _read_completion(where: str, source: dict, data: DataConfig) -> str:
    """Read the answer of a row of TRL's: its own field, the completion or its last message; empty where it has a prompt
    alone."""
    check_type(where, source)
    if (answer := source.get(data.answer_field)) is not None:
        return spell_answer(answer, f'{where}: field "{data.answer_field}"')
    completion = source.get(COMPLETION, "")
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        completion = completion[-1].get("content")
    if not isinstance(completion, str):
        raise ValueError(
            f'{where}: field "{COMPLETION}" must be text or a list of messages, the last with text for its content, '
            f"got {reprlib.repr(source.get(COMPLETION))}"
        )
    return completion


def check_type(where: str, source: dict) -> None:
    """Raise ValueError for a TRL row from which nothing here learns: a preference, or a single text."""
    found = [name for name in _PREFERENCES if source.get(name) is not None]
    if "chosen" in found or "rejected" in found or (found and isinstance(source.get(COMPLETION), str | list)):
        raise ValueError(
            f'{where}: field "{found[0]}" makes it a row of preferences, which no algorithm here learns from; give '
            "rows of prompt and completion, or of messages, or leave the field out"
        )
    if "text" in source and not {"prompt", "messages"} & source.keys():
        raise ValueError(
            f'{where}: field "text" alone does not say which part is learned; give rows of prompt and completion, or '
            "of messages"
        )


def spell_answer(value: Any, place: str) -> str:
    """Spell an answer as text: a decimal number by its digits, a date by ISO 8601, any other value as its JSON.

    Args:
        place: where it stands, for the message.

    Raises:
        ValueError: JSON has no such value, as bytes, durations and NaN.
    """
    if isinstance(value, str):
        return value
    try:
        return _spell_plain(value) if isinstance(value, Decimal | date | time) else _spell_json(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{place} is or has a value that JSON has no form for, got {type(value).__name__} {reprlib.repr(value)}; "
            "make it text or a number"
        ) from None


def _spell_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_spell_plain)


def _spell_plain(value: Any) -> str:
    """Spell a decimal number or a date as text; TypeError for other types, as ``json.dumps`` takes it."""
    if isinstance(value, Decimal) and value.is_finite():
        return f"{value:f}"
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError
