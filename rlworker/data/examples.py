"""Rows with their answers, as supervised training learns from them."""

from dataclasses import dataclass

from engines.batch.batch import TrainBatch
from engines.batch.samples import Image
from engines.images.columns import make_image_columns
from engines.models.spec import ModelSpec
from engines.models.vision_spec import VisionSpec
from rlworker.config.sft import SftConfig
from rlworker.data.encoding import encode_after
from rlworker.data.images import MARKER, VIDEO_MARKER, ImageReader
from rlworker.data.rows import Row, check_vocabulary, list_stop_tokens, read_rows
from rlworker.data.turns import write_turn


@dataclass(frozen=True)
class Example:
    """Prompt and answer in tokens, the one that ends the answer last; ``prompt_length`` of them are the prompt, which
    has ``images``."""

    ids: tuple[int, ...]
    prompt_length: int
    images: tuple[Image, ...] = ()


def read_examples(
    path: str, tokenizer, config: SftConfig, model: ModelSpec, image_reader: ImageReader | None = None
) -> tuple[list[Example], int]:
    """Read the rows at ``path`` as examples, and how many were skipped because they are too long.

    Raises:
        ValueError: as ``read_rows``; an answer is too long or has an image token, or a token is not in the
            model's vocabulary.
    """
    stops = list_stop_tokens(model.folder, tokenizer, model.vocab)
    ends = tokenizer.convert_ids_to_tokens(stops)
    read = read_rows(path, tokenizer, config.data, image_reader)
    texts, examples, most = [], [], config.max_answer_tokens
    for row in read.rows:
        try:
            answer = _encode_answer(row, tokenizer, ends)
        except Exception as error:  # of whatever kind the template has
            raise ValueError(
                f"data: {path}: the chat template refuses {row.answer[:80]!r} as the assistant's message: {error}"
            ) from None
        if markers := [marker for marker in (MARKER, VIDEO_MARKER) if marker in row.answer and image_reader]:
            raise ValueError(f"data: {path}: the answer {row.answer[:80]!r} has {markers[0]}: only prompts have images")
        if banned := set(answer) & set(model.banned_tokens):
            raise ValueError(
                f"data: {path}: the answer {row.answer[:80]!r} has tokens {sorted(banned)}, which stand for images; "
                "leave them out"
            )
        if len(answer) <= most:
            texts.append(row.prompt)
            examples.append(Example((*row.prompt_ids, *answer), len(row.prompt_ids), row.images))
        elif not config.data.skip_long_prompts:
            raise ValueError(
                f"data: {path}: the answer {row.answer[:80]!r} has {len(answer) - 1} tokens and an end, expected at "
                f"most {most}; raise --max-answer-tokens or leave long ones out with --data.skip-long-prompts"
            )
    if not examples:
        raise ValueError(f"data: {path}: all answers are longer than {most} tokens; raise --max-answer-tokens")
    check_vocabulary(texts, [example.ids for example in examples], model.vocab)
    return examples, read.skipped + len(read.rows) - len(examples)


def _encode_answer(row: Row, tokenizer, ends: list[str]) -> list[int]:
    """Encode the answer of a row, as it stands behind the prompt, with the token that ends it."""
    text, has_end = row.answer, False
    if row.messages:
        text, has_end = write_turn(row.messages, {"role": "assistant", "content": row.answer}, tokenizer, ends)
    ids = encode_after(tokenizer, row.prompt_ids[-1], text)
    return ids if has_end else [*ids, tokenizer.eos_token_id]


def to_batch(examples: list[Example], vision: VisionSpec | None = None) -> TrainBatch:
    """Batch the examples' tokens; the answers' are those that count."""
    ids = [example.ids for example in examples]
    columns = make_image_columns(ids, [example.images for example in examples], vision) if vision else {}
    return TrainBatch.from_ids(ids, [example.prompt_length for example in examples], **columns)
