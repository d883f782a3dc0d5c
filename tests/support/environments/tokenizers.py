"""Tokenizers of the kinds that real models have, of their own parts: a small vocabulary is trained on the spot."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Kind = Literal["llama2", "zephyr", "mistral", "metaspace", "phi3", "qwen"]
KINDS: tuple[Kind, ...] = ("llama2", "zephyr", "mistral", "metaspace", "phi3", "qwen")

_TEXTS = ["The answer is forty two. The question was: what is the answer? Hi, hello there.\n", "a b c 4 42 = + ok"] * 4
_EACH = "{{ bos_token if loop.first and %s }}{%% if m.role == 'user' %%}%s{%% else %%}%s{%% endif %%}"
_USER, _ANSWER = "{{ '<|user|>\\n' + m.content + '%s\\n' }}", "{{ '<|assistant|>\\n' + m.content + '%s\\n' }}"
_GO_ON = "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"


def _write_template(user: str, answer: str, after: str = "", opens: str = "true") -> str:
    return "{% for m in messages %}" + _EACH % (opens, user, answer) + "{% endfor %}" + after


_INSTRUCT = "{{ '[INST] ' + m.content + ' [/INST]' }}"
TEMPLATES: dict[Kind, str] = {
    "llama2": _write_template(_INSTRUCT, "{{ ' ' + m.content + ' ' + eos_token }}"),
    "zephyr": _write_template(_USER % "</s>", _ANSWER % "</s>", _GO_ON, "false"),
    "mistral": _write_template(_INSTRUCT.replace(" [/", "[/"), "{{ ' ' + m.content + eos_token }}"),
    "metaspace": _write_template(_USER % "</s>", _ANSWER % "</s>", _GO_ON, "false"),
    "phi3": _write_template(
        _USER % "<|end|>", _ANSWER % "<|end|>", _GO_ON.replace("{% endif", "{% else %}{{ eos_token }}{% endif"), "false"
    ),
    "qwen": _write_template(
        "{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}",
        "{{ '<|im_start|>assistant\\n' + m.content + '<|im_end|>\\n' }}",
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "false",
    ),
}
"""Kind -> its chat template, system messages and tools left out."""
_ADDED: dict[Kind, tuple[tuple[str, ...], bool]] = {
    "mistral": (("[INST]", "[/INST]"), False),
    "phi3": (("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"), True),
    "qwen": (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), False),
}
"""Kind -> special tokens beyond ``<unk> <s> </s>``, and whether they take the white space behind them (``rstrip``)."""


@cache
def make_tokenizer(kind: Kind) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a kind: Llama 2's (and its Zephyr) with ``Prepend``, Mistral's with ``Metaspace`` at the
    first text or, as T5's, at each, Phi-3's with ``rstrip``, and Qwen's of bytes."""
    from transformers import PreTrainedTokenizerFast

    special, (further, rstrip) = ["<unk>", "<s>", "</s>"], _ADDED.get(kind, ((), False))
    if kind == "qwen":
        tokenizer = Tokenizer(models.BPE(**_train(pre_tokenizers.ByteLevel(add_prefix_space=False), special)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        first = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        trained = _train(pre_tokenizers.Metaspace(), first)
        tokenizer = Tokenizer(models.BPE(**trained, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        if kind in ("mistral", "metaspace"):
            scheme = "first" if kind == "mistral" else "always"
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        else:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(parts)
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in special])
    tokenizer.add_special_tokens([AddedToken(each, rstrip=rstrip, normalized=False) for each in further])
    end = "<|endoftext|>" if "<|endoftext|>" in further else "</s>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=end, unk_token="<unk>", chat_template=TEMPLATES[kind]
    )


def _train(pre_tokenizer, first: list[str]) -> dict:
    """Train merges behind the tokens that come first: ``vocab`` and ``merges``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if isinstance(pre_tokenizer, pre_tokenizers.ByteLevel) else []
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = [*first, *sorted(model["vocab"], key=model["vocab"].get)]
    return {"vocab": {token: i for i, token in enumerate(vocab)}, "merges": [tuple(pair) for pair in model["merges"]]}
