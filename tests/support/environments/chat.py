"""Chat templates as models have them, and a tokenizer that never encodes what was sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken

from recipes.common.addition import make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "ok")
"""Tokens beyond one per character; ``ok`` can be sampled as two tokens as well."""
SAMPLED = "~"
"""A letter that stands in every sampled text, and in no other."""

_TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"""
_RESULTS = """\
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"""
_END = "{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

QWEN2_5 = (
    _TOOLS
    + """
{%- for message in messages %}
{%- if message.role in ('system', 'user', 'assistant') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"""
    + _RESULTS
    + _END
)
"""The template of Qwen2.5: tools as Hermes has them, results of tools as a turn of the user, nothing rewritten."""

QWEN3 = (
    "{%- set last = namespace(query=-1) %}"
    "{%- for message in messages if message.role == 'user' %}{% set last.query = messages.index(message) %}{% endfor %}"
    + _TOOLS
    + """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content, thought = message.content, '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- set thought = '<think>\\n' + thought + '\\n</think>\\n\\n' if thought and loop.index0 > last.query else '' %}
{{- '<|im_start|>assistant\\n' + thought + content + '<|im_end|>\\n' }}
{%- elif message.role in ('system', 'user') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"""
    + _RESULTS
    + _END
)
"""The template of Qwen3: thinking stays until the user speaks again, and is dropped from then on."""


class GuardedTokenizer:
    """A tokenizer that raises where it is asked to encode what was sampled."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str):
        if name == "_tokenizer":  # of one that is being unpickled
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str | list[str], **options):
        assert SAMPLED not in "".join(text), f"sampled text is encoded again: {text!r}"
        return self._tokenizer(text, **options)


def make_chat_tokenizer(template: str) -> GuardedTokenizer:
    """Make a tokenizer of a token per character, the tokens of chat, and a template."""

    tokenizer = make_tokenizer(template)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in CHAT_TOKENS])
    return GuardedTokenizer(tokenizer)
