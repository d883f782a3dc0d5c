"""Rows to learn from: read files and data sets, tokenize prompts, and pick the rows of each step."""

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from engines.batch.samples import Image
from engines.validation import fits
from rlworker.config.sections import DataConfig
from rlworker.data.bad_images import BadImage, BadRows
from rlworker.data.chat.messages import (
    TOOLS,
    add_system,
    check_messages,
    drop_blank_keys,
    flatten_content,
    has_images,
    list_parts,
    read_tools,
    set_template_arguments,
)
from rlworker.data.encoding import encode_prompts
from rlworker.data.formats import iterate_formatted
from rlworker.data.sources import find_base_folder

if TYPE_CHECKING:  # rows of text load nothing of images
    from rlworker.data.images import ImageReader

Item = TypeVar("Item")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Row:
    """One question, with its answer.

    Attributes:
        prompt: the prompt's text, chat template applied.
        prompt_ids: token ids of the prompt, with image tokens and the tokenizer's opening tokens (BOS).
        answer: the answer, for the reward function.
        source: the whole row in plain Python values, for reward functions that need more.
        images: the images and videos of the prompt, in order.
        messages: the chat messages of the prompt; empty for plain text.
        tools: JSON schemas of the tools that the prompt shows.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    source: dict
    images: tuple[Image, ...] = ()
    messages: tuple[dict, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Rows:
    """The rows of one source.

    Attributes:
        skipped: number of rows that were left out for too long a prompt or bad images.
        places: where each row stands, for messages.
    """

    rows: list[Row]
    skipped: int
    places: tuple[str, ...] = ()


def load_tokenizer(
    folder: str,
    template_arguments: Mapping[str, Any] = MappingProxyType({}),
    answers: bool = True,
    section: str = "data",
):
    """Load the tokenizer that is saved with a model, and set variables of its chat template.

    Args:
        section: names the settings that have the variables, for messages.

    Raises:
        ValueError: the folder has no readable tokenizer; the model ``answers``, and has no end-of-sequence token, so
            that nothing would end an answer; or the chat template does not read a variable.
    """
    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
        # transformers would make an empty tokenizer without a word
        raise ValueError(
            f"model: folder {folder!r} has no tokenizer (one of {', '.join(_TOKENIZER_FILES)}); save one there"
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
    if answers and tokenizer.eos_token_id is None:
        raise ValueError(
            f"model: the tokenizer in {folder!r} has no eos token, so nothing ends an answer; set eos_token in its "
            "tokenizer_config.json"
        )
    set_template_arguments(tokenizer, template_arguments, section)
    tokenizer.clean_up_tokenization_spaces = False  # Llama 3's drops spaces that were sampled, as that before a comma
    return tokenizer


def list_stop_tokens(folder: str, tokenizer: Any, vocab: int) -> tuple[int, ...]:
    """List the ids that end an answer: the tokenizer's eos, those of ``read_ends``, and the chat template's end of a
    turn.

    A model that was tuned to chat may end its turns with a token that its tokenizer does not call eos (Gemma).

    Raises:
        ValueError: as for ``read_ends``, or the model has ``vocab`` tokens and the tokenizer's eos is beyond them.
    """
    ids = [tokenizer.eos_token_id, *read_ends(folder, vocab)]
    if ids[0] >= vocab:
        raise ValueError(f"model: the tokenizer's eos token is {ids[0]}, the model has {vocab} tokens")
    end = import_templates().find_turn_end(tokenizer) if tokenizer.chat_template else ""
    if end:
        ids.append(tokenizer.convert_tokens_to_ids(end))
    return tuple(number for number in dict.fromkeys(ids) if number < vocab)


def read_ends(folder: str, vocab: int) -> list[int]:
    """Read the end-of-sequence ids that ``generation_config.json`` names, or else ``config.json``.

    Raises:
        ValueError: a file cannot be read, or names an id that the model of ``vocab`` tokens does not have.
    """
    for path in (Path(folder, name) for name in ("generation_config.json", "config.json")):
        ids = _read_ends(path)
        if lacking := [number for number in ids if not 0 <= number < vocab]:
            raise ValueError(
                f"model: {str(path)!r} has eos_token_id {lacking[0]}, the model has {vocab} tokens; take the files "
                "that belong to it"
            )
        if ids:
            return ids
    return []


def _read_ends(path: Path) -> list[int]:
    """Read the end-of-sequence tokens that a config names, of a vision-language model that of its text."""
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        parts = [config, config.get("text_config") or {}]
        named = next((part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None), None)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"model: {str(path)!r} cannot be read ({error}); save it there again") from None
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not fits(list[int], ids):
        raise ValueError(
            f"model: {str(path)!r} has eos_token_id {named!r}, expected the number of a token or several in a list"
        )
    return ids


def check_vocabulary(texts: Sequence[str], ids: Sequence[Sequence[int]], vocab: int) -> None:
    """Raise ValueError if ids are not below ``vocab``, the number of tokens of the model.

    Args:
        texts: for each prompt in ``ids``, its text for the message.
    """
    for text, numbers in zip(texts, ids, strict=True):
        if max(numbers) >= vocab:
            raise ValueError(
                f"data: the row of prompt {text[:80]!r} has token {max(numbers)}, the model has {vocab} tokens; take "
                "the tokenizer that belongs to the model"
            )


def check_rows(path: str, data: DataConfig) -> None:
    """Check the fields of every row at ``path`` without a tokenizer, which is quick.

    Raises:
        ValueError: there are no rows, or a row is broken; the message has place, row and field.
    """
    for _ in _iterate_checked(path, data):
        pass


def read_first_row(path: str, data: DataConfig) -> tuple[str, Row]:
    """Read the first row of a source and where it stands, without a tokenizer: it has no ids and no images, and the
    text of its messages without a chat template.

    Raises:
        ValueError: there are no rows, or the row is broken.
    """
    where, source = next(_iterate_checked(path, data))
    prompt = source[data.prompt_field]
    messages = _make_messages(prompt, data)
    text = prompt if isinstance(prompt, str) else "\n".join(flatten_content(m.get("content")) or "" for m in messages)
    return where, Row(text, (), source[data.answer_field], source, messages=messages)


def read_rows(path: str, tokenizer, data: DataConfig, image_reader: "ImageReader | None" = None) -> Rows:
    """Read the rows of a source (``DataConfig.train`` lists the kinds) and tokenize their prompts.

    Messages (``[{"role": ..., "content": ...}, ...]``) go through the chat template. Text is only preceded by the
    tokenizer's opening tokens, unless ``data.instruction`` or ``data.system`` makes it a message.

    Args:
        image_reader: reader of a vision-language model; without it a row with images is refused.

    Raises:
        ValueError: there are no rows, a row is broken, a prompt is too long (with ``skip_long_prompts``: all are), an
            image cannot be read (without ``skip_bad_images``: all bad rows are read first), or the number of images
            differs from their places. The message has place, row and field.
    """
    places, sources, texts, images, chats, shown_tools = [], [], [], [], [], []
    base, bad = find_base_folder(path), BadRows(path, data)
    for where, source in _iterate_checked(path, data):
        try:
            row_images = read_images(source, source[data.prompt_field], where, data, base, image_reader)
        except BadImage as error:
            bad.add(error)
            continue
        # What a row holds as bytes is on disk now: not every process that sees the row need hold it.
        if paths := [image.path for image in row_images if not image.is_video]:
            named: dict[str, Any] = {data.image_field: paths}
            source = source | named
        messages = _make_messages(source[data.prompt_field], data)
        tools = _read_shown_tools(source, where, data)
        text = source[data.prompt_field]
        if messages:
            text = _apply_template(messages, tokenizer, where, data, tools)
        places.append(where)
        chats.append(messages)
        shown_tools.append(tools)
        sources.append(source)
        texts.append(image_reader.replace_markers(text, tokenizer) if image_reader else text)
        images.append(row_images)
    bad.settle(len(places))
    if image_reader and not any(images):
        image_reader.refuse_other_fields(sources[0], places[0], data)
    encoded = encode_prompts(tokenizer, texts, [not messages for messages in chats])
    rows, kept_places, limit = [], [], data.max_prompt_tokens
    for number, where in enumerate(places):
        ids, own = encoded[number], images[number]
        if image_reader:
            ids, own = image_reader.expand_ids(ids, own, where, data)
        if len(ids) > limit and data.skip_long_prompts:
            continue
        if not 0 < len(ids) <= limit:
            raise ValueError(
                f'{where}: field "{data.prompt_field}" has {len(ids)} tokens, expected 1 to {limit}; change the prompt,'
                " raise --data.max-prompt-tokens or skip long prompts with --data.skip-long-prompts"
            )
        source, tools = sources[number], shown_tools[number]
        rows.append(Row(texts[number], tuple(ids), source[data.answer_field], source, own, chats[number], tools))
        kept_places.append(where)
    if not rows:
        raise ValueError(
            f"data: {path}: all {len(encoded)} prompts are longer than {limit} tokens, the shortest has "
            f"{min(map(len, encoded))}; raise --data.max-prompt-tokens"
        )
    return Rows(rows, skipped=len(encoded) - len(rows) + len(bad), places=tuple(kept_places))


def read_images(
    source: dict, prompt: Any, where: str, data: DataConfig, base: Path, image_reader: "ImageReader | None"
) -> tuple[Image, ...]:
    """Read the images and videos of a row by ``ImageReader.read_row``; ValueError if the model has no vision."""
    if image_reader:
        return image_reader.read_row(source, where, data, base)
    if source.get(data.image_field) or source.get(data.video_field) or has_images(prompt):
        raise ValueError(
            f'{where}: field "{data.image_field}", "{data.video_field}" or the prompt has images or videos, which this '
            "model cannot see; take a vision-language model, or name other fields with --data.image-field and "
            "--data.video-field"
        )
    return ()


def _iterate_checked(path: str, data: DataConfig) -> Iterator[tuple[str, dict]]:
    """Iterate over the rows, each after where it stands, its fields checked. Rows of a table count from 0, lines of a
    file from 1."""
    rows = iterate_formatted(path, data)
    empty = True
    for where, source in rows:
        _check_fields(where, source, data)
        yield where, source
        empty = False
    if empty:
        raise ValueError(f"data: {path} has no rows")


def _check_fields(where: str, source: dict, data: DataConfig) -> None:
    prompt, answer = source.get(data.prompt_field), source.get(data.answer_field)
    prompt_place, answer_place = (f'{where}: field "{name}"' for name in (data.prompt_field, data.answer_field))
    if not prompt:
        raise ValueError(
            f"{prompt_place} is missing or empty, the row has {', '.join(source)}; it must be text or a list of "
            "messages (another field: --data.prompt-field)"
        )
    if not isinstance(prompt, str | list):
        raise ValueError(f"{prompt_place} must be text or a list of messages, got {reprlib.repr(prompt)}")
    if isinstance(prompt, str) and _is_chat_json(prompt):
        raise ValueError(
            f"{prompt_place} has messages as the text of JSON, got {prompt[:80]!r}; store them as a list of objects"
        )
    check_chat(drop_blank_keys(list_parts(prompt)), prompt_place, data)
    if not isinstance(answer, str):
        raise ValueError(
            f"{answer_place} must be text, got {type(answer).__name__}, the row has {', '.join(source)}; make it text "
            "or name another field with --data.answer-field"
        )
    for place, text in ((prompt_place, prompt), (answer_place, answer)):
        if isinstance(text, str):
            _check_encodable(place, text)
    _read_shown_tools(source, where, data)


def check_chat(messages: Sequence[Any], place: str, data: DataConfig) -> None:
    """Raise ValueError if a chat template cannot take the messages of a row; the error's text begins with ``place``."""
    check_messages(messages, place)
    if any(set(part) - {"type", "text"} for m in messages for part in list_parts(m.get("content"))):
        raise ValueError(
            f"{place} has a part with more than its type and text; an image is named in the field "
            f'"{data.image_field}" of the row, and its part says {{"type": "image"}} alone; so is a video in '
            f'"{data.video_field}"'
        )
    if messages and data.instruction:
        raise ValueError(
            f"{place} has messages, but data.instruction is added only to prompts that are text; write the instruction "
            'into the messages and set --data.instruction ""'
        )
    for text in (text for m in messages for text in (m["role"], flatten_content(m.get("content")) or "")):
        _check_encodable(place, text)


def _is_chat_json(text: str) -> bool:
    """Tell whether a text is the JSON of messages, which a table of strings holds."""
    if not text.lstrip().startswith("["):
        return False
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(messages) and all(isinstance(m, dict) and "role" in m for m in messages)


def _check_encodable(place: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can hold and no tokenizer takes
        raise ValueError(f"{place} is no valid Unicode text: {error}; remove that character") from None


def _make_messages(prompt: str | list[dict], data: DataConfig) -> tuple[dict, ...]:
    """Return the messages that a prompt is or becomes; none where it stays text."""
    if isinstance(prompt, str):
        if not (data.instruction or data.system):
            return ()
        text = f"{prompt}\n\n{data.instruction}" if data.instruction else prompt
        prompt = [{"role": "user", "content": text}]
    return add_system(drop_blank_keys(prompt), data.system)


def _read_shown_tools(source: dict, where: str, data: DataConfig) -> tuple[dict[str, Any], ...]:
    """Return the JSON schemas of the tools that the chat template shows with a row's prompt; a text shows none."""
    if isinstance(source[data.prompt_field], str) and not (data.instruction or data.system):
        return ()
    return read_tools(source.get(TOOLS), f'{where}: field "{TOOLS}"')


def import_templates():
    """Import what only a tokenizer with a chat template needs."""
    from rlworker.data.chat import templates

    return templates


def _apply_template(
    messages: Sequence[dict], tokenizer, where: str, data: DataConfig, tools: Sequence[dict[str, Any]]
) -> str:
    place = f'{where}: field "{data.prompt_field}"'
    if not tokenizer.chat_template:
        has, remedy = "has messages", "give text"
        if key := next((name for name in ("instruction", "system") if getattr(data, name)), ""):
            has, remedy = f"would become a message by data.{key}", f'set --data.{key} ""'
        raise ValueError(f"{place} {has}, but the tokenizer has no chat template; {remedy}")
    try:
        return import_templates().render_messages(messages, tokenizer, tools)
    except Exception as error:  # a template raises one kind for roles and orders, and others on the messages' values
        raise ValueError(f"{place}: the chat template refuses these messages: {error}") from None


def pick_rows(rows: Sequence[Item], count: int, start: int, seed: int) -> list[Item]:
    """Pick the next ``count`` rows of a run that has taken ``start`` rows before.

    Each epoch has an order of its own, and a step may straddle two epochs. The choice depends on the arguments alone,
    so a resumed run sees the same rows as an uninterrupted run.
    """
    chosen_rows = []
    for place in range(start, start + count):
        epoch, index = divmod(place, len(rows))
        if not chosen_rows or index == 0:
            order = np.random.default_rng([seed, epoch]).permutation(len(rows))
        chosen_rows.append(rows[order[index]])
    return chosen_rows
