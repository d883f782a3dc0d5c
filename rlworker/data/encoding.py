"""Encode a text that follows other tokens, and decode ids that follow another id.

Many tokenizers encode a text differently at the start than after other text. Llama's and Mistral's put a space before
any text (``Prepend``, ``Metaspace``). A token with ``rstrip``, as in Phi-3, takes the white space after it. Only the
last token before a text matters for this, and these functions need its id alone: sampled tokens are never encoded
again.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

ORDINARY = -1
"""Stands for the id of any token of plain text, in contrast to special tokens such as ``<s>``."""
_LETTERS = ("\n", "0")
"""Letters that stand for the plain text before a boundary; no text begins with letters that merge with both."""


def encode_after(tokenizer: Any, last: int | None, text: str) -> list[int]:
    """Encode a text that follows other tokens, ``[T]`` ids, so that they decode as a continuation.

    The ids before the boundary stay as they are. If the joint text would merge letters across the boundary, the text is
    encoded as after a letter with which it does not merge. Special tokens in the text are recognised; none is added.

    Args:
        last: the token before the text: its id, ``ORDINARY``, or None at the start of a sequence.
    """
    if last is None:
        return _encode(tokenizer, text)
    written = None if last == ORDINARY else _list_added(tokenizer).get(last) or _decode(tokenizer, [last])
    for context in (written, *_LETTERS) if written else _LETTERS:
        head, whole = _encode(tokenizer, context), _encode(tokenizer, context + text)
        # A tokenizer of whole words makes one unknown token of a letter, and the same one of letter and text.
        is_meant = head == [last] if context == written else _decode(tokenizer, head).strip(" ") == context
        if head and is_meant and whole[: len(head)] == head:
            return whole[len(head) :]
    return _encode(tokenizer, text)


def decode_after(tokenizer: Any, last: int, token_ids: Sequence[int]) -> str:
    """Decode ids ``[T]`` that follow the token ``last``, with the space that tokenizers such as Llama's drop at a
    start.

    Special tokens are written out.
    """
    head, whole = _decode(tokenizer, [last]), _decode(tokenizer, [last, *token_ids])
    if whole.startswith(head):
        return whole[len(head) :]
    return _decode(tokenizer, token_ids)  # from within a character on


def encode_prompts(tokenizer: Any, texts: Sequence[str], is_plain: Sequence[bool]) -> list[list[int]]:
    """Encode the texts that sequences begin with.

    A plain text gets the special tokens with which the tokenizer opens a text, unless it has them written out; the text
    of a chat template has its own.

    Args:
        is_plain: for each text, whether it is plain.

    Raises:
        ValueError: the tokenizer changes the ids of a text when it adds special tokens.
    """
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    if True not in is_plain:
        return encoded
    first = is_plain.index(True)
    opening = _find_opening(tokenizer, texts[first], encoded[first])
    return [
        ids if not plain or ids[: len(opening)] == opening else opening + ids
        for ids, plain in zip(encoded, is_plain, strict=True)
    ]


def _find_opening(tokenizer: Any, text: str, ids: list[int]) -> list[int]:
    """Find the special tokens that the tokenizer puts before any text (BOS), given the ``ids`` of a text without
    them. Special tokens after a text are left out: a prompt is continued."""
    encoding = tokenizer(text, return_special_tokens_mask=True)
    whole, count = encoding["input_ids"], len(list(takewhile(bool, encoding["special_tokens_mask"])))
    if whole[count : count + len(ids)] != ids:
        raise ValueError(
            f"model: the tokenizer makes {whole[:20]} of {text[:80]!r} with its special tokens, expected {ids[:20]} "
            "with further ids around them; take the tokenizer that belongs to the model, saved as tokenizer.json"
        )
    return whole[:count]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)


@lru_cache(maxsize=4)  # of thousands of tokens it takes milliseconds
def _list_added(tokenizer: Any) -> dict[int, str]:
    """List the added tokens, which a tokenizer finds before it splits a text: id -> text; special tokens are some."""
    return {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
