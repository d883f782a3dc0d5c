"""Rows with answers, as supervised training learns from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.batch.batch import TrainBatch
from engines.batch.samples import Image
from engines.images import make_columns
from engines.models.spec import ModelSpec
from engines.models.vision.vision_spec import VisionSpec
from rlworker.config.sections import DataConfig
from rlworker.config.sft import SftConfig
from rlworker.data.bad_images import BadImage, BadRows
from rlworker.data.chat.messages import MARKER, VIDEO_MARKER
from rlworker.data.chat.turns import write_turn
from rlworker.data.conversations import ConversationEncoder, has_conversations, iterate_conversations
from rlworker.data.encoding import encode_after, encode_prompts
from rlworker.data.images import ImageReader
from rlworker.data.rows import Row, check_vocabulary, list_stop_tokens, read_images, read_rows
from rlworker.data.sources import find_base_folder


@dataclass(frozen=True)
class Example:
    """A sequence to learn from.

    Attributes:
        ids: prompt and answer, ending with the token that ends the answer; or a whole conversation.
        prompt_length: number of ids before the first id that is learned.
        images: images and videos in the order of their tokens.
        turns: begin and end of each of the model's turns in a conversation; empty where everything after the prompt is
            learned.
    """

    ids: tuple[int, ...]
    prompt_length: int
    images: tuple[Image, ...] = ()
    turns: tuple[tuple[int, int], ...] = ()

    def mark_learned(self) -> np.ndarray:
        """Return a mask of the ids that are learned, ``[T]`` bool."""
        learned = np.zeros(len(self.ids), bool)
        for first, end in self.turns or ((self.prompt_length, len(self.ids)),):
            learned[first:end] = True
        return learned


def read_examples(
    path: str, tokenizer, config: SftConfig, model: ModelSpec, image_reader: ImageReader | None = None
) -> tuple[list[Example], int]:
    """Read the rows at ``path`` as examples.

    A row has a prompt and an answer, or a conversation, of which the assistant's messages are learned.

    Returns:
        the examples, and the number of rows that were skipped: too long, or with bad images.

    Raises:
        ValueError: as for ``read_rows``; an answer or a conversation is too long or has an image token, or a token is
            not in the model's vocabulary.
    """
    stops = list_stop_tokens(model.folder, tokenizer, model.vocab)
    if has_conversations(path, config.data):
        encoder = ConversationEncoder(tokenizer, stops, config.data, image_reader)
        return _read_conversations(path, encoder, config, model)
    ends = tokenizer.convert_ids_to_tokens(stops)
    read = read_rows(path, tokenizer, config.data, image_reader)
    texts, examples, most = [], [], config.max_answer_tokens
    for row, where in zip(read.rows, read.places, strict=True):
        try:
            prompt_ids, answer = _encode_answer(row, tokenizer, ends, image_reader, where, config.data)
        except Exception as error:  # a template may raise errors of any kind
            raise ValueError(
                f"{where}: the chat template refuses {row.answer[:80]!r} as the assistant's message: {error}"
            ) from None
        if markers := [marker for marker in (MARKER, VIDEO_MARKER) if marker in row.answer and image_reader]:
            raise ValueError(
                f"data: {path}: the answer {row.answer[:80]!r} has {markers[0]}, which only prompts may have; remove it"
            )
        if banned := set(answer) & set(model.banned_tokens):
            raise ValueError(
                f"data: {path}: the answer {row.answer[:80]!r} has tokens {sorted(banned)}, which stand for images; "
                "leave them out"
            )
        if len(answer) <= most:
            texts.append(row.prompt)
            examples.append(Example((*prompt_ids, *answer), len(prompt_ids), row.images))
        elif not config.data.skip_long_prompts:
            raise ValueError(
                f"data: {path}: the answer {row.answer[:80]!r} has {len(answer) - 1} tokens and an end, expected at "
                f"most {most}; raise --max-answer-tokens or skip long answers with --data.skip-long-prompts"
            )
    if not examples:
        raise ValueError(f"data: {path}: all answers are longer than {most} tokens; raise --max-answer-tokens")
    check_vocabulary(texts, [example.ids for example in examples], model.vocab)
    return examples, read.skipped + len(read.rows) - len(examples)


def _read_conversations(
    path: str, encoder: ConversationEncoder, config: SftConfig, model: ModelSpec
) -> tuple[list[Example], int]:
    """Read conversations as ``read_examples``; one that the template rewrites on its way is of several examples."""
    data, base, examples, places, skipped = config.data, find_base_folder(path), [], [], 0
    good, bad = 0, BadRows(path, data)
    for each in iterate_conversations(path, data):
        try:
            images = read_images(each.source, list(each.messages), each.where, data, base, encoder.image_reader)
        except BadImage as error:
            bad.add(error)
            continue
        good += 1
        sequences = encoder.encode(each, images)
        if (size := max(len(ids) for ids, _, _ in sequences)) > config.longest:
            if not data.skip_long_prompts:
                raise ValueError(
                    f"{each.where}: the conversation has {size} tokens, expected at most data.max_prompt_tokens + "
                    f"max_answer_tokens = {config.longest}; raise --data.max-prompt-tokens or --max-answer-tokens, or "
                    "skip long conversations with --data.skip-long-prompts"
                )
            skipped += 1
            continue
        for ids, turns, shown in sequences:
            said = {token for first, end in turns for token in ids[first:end]}
            if banned := said & set(model.banned_tokens):
                raise ValueError(
                    f"{each.where}: the assistant says tokens {sorted(banned)}, which stand for images; leave them out"
                )
            examples.append(Example(ids, turns[0][0], shown, turns))
            places.append(each.where)
    bad.settle(good)
    if not examples:
        raise ValueError(
            f"data: {path}: all conversations are longer than {config.longest} tokens; raise --data.max-prompt-tokens"
        )
    check_vocabulary(places, [example.ids for example in examples], model.vocab)
    return examples, skipped + len(bad)


def _encode_answer(
    row: Row, tokenizer: Any, ends: list[str], image_reader: ImageReader | None, where: str, data: DataConfig
) -> tuple[Sequence[int], list[int]]:
    """Encode the answer of a row, as it stands behind the prompt, with the token that ends it.

    Returns:
        the ids before the answer, which are the prompt's unless the template writes its end in another way before an
        answer, and the ids of the answer.
    """
    prompt_ids, text, has_end = row.prompt_ids, row.answer, False
    if row.messages:
        turn = write_turn(row.messages, {"role": "assistant", "content": row.answer}, tokenizer, ends, row.tools)
        text, has_end = turn.said, turn.has_end
        context = image_reader.replace_markers(turn.context, tokenizer) if image_reader else turn.context
        if context != row.prompt:
            (prompt_ids,) = encode_prompts(tokenizer, [context], [False])
            if image_reader:
                prompt_ids, _ = image_reader.expand_ids(prompt_ids, row.images, where, data)
    ids = encode_after(tokenizer, prompt_ids[-1], text)
    return prompt_ids, ids if has_end else [*ids, tokenizer.eos_token_id]


def to_batch(examples: list[Example], vision: VisionSpec | None = None) -> TrainBatch:
    """Make a batch of examples, in which the learned tokens count.

    Args:
        vision: description of a model that sees images; None for text.
    """
    ids = [example.ids for example in examples]
    columns = make_columns(ids, [example.images for example in examples], vision)
    return TrainBatch.from_ids(ids, sampled=[example.mark_learned() for example in examples], **columns)
