"""The prose of a markdown page, and the length of its lines and sentences."""

import re

_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"(!?\[[^\]]*\])\([^)]*\)")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
_END = re.compile(r"(?<=[.?!])[\"')*_]*\s+(?![a-z])")
"""Where a sentence ends: ``e.g. this`` goes on, and so does ``3.11``."""


def strip_code(page: str) -> list[str]:
    """List a page's lines; those of fenced blocks are empty."""
    lines, in_fence = [], False
    for line in page.splitlines():
        is_fence = line.lstrip().startswith("```")
        in_fence ^= is_fence
        lines.append("" if in_fence or is_fence else line)
    return lines


def find_long_lines(page: str, limit: int) -> list[str]:
    """List the lines of more than ``limit`` characters: those of tables and code, and the targets of links, aside."""
    prose = (line for line in strip_code(page) if not line.startswith("|"))
    return [line for line in prose if len(_LINK.sub(r"\1", line)) > limit]


def split_sentences(page: str) -> list[str]:
    """List a page's sentences, as ``count_words`` counts them: paragraphs, items, headings and cells of tables.

    A span of code is one word, and so is a name in a link. A colon or a semicolon ends no sentence.
    """
    blocks, open_block = [], False
    for line in strip_code(page):
        text = _CODE.sub("Code", _LINK.sub(r"\1", line)).strip()
        if text.startswith("|"):
            blocks += [cell.strip() for cell in text.strip("|").split("|")]
        elif open_block and text and not text.startswith("#") and not _ITEM.match(line):
            blocks[-1] += f" {text}"
            continue
        elif text:
            blocks.append(text)
        open_block = bool(text) and not text.startswith(("|", "#"))
    return [sentence for block in blocks for sentence in _END.split(block) if count_words(sentence)]


def count_words(sentence: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in sentence.split())
