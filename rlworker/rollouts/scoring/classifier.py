"""A classifier answers questions: the logit of one of its labels for a text or for chat messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engines.config.served import ClassifierSpec
from rlworker.data.encoding import encode_prompts
from rlworker.data.rows import load_tokenizer
from rlworker.environments.record import Verdict

LogitsFn = Callable[[list[list[int]]], list[np.ndarray]]
"""``compute_logits(prompts)`` returns the logits ``[T, labels]`` of each prompt."""


class Classifier:
    """Encodes questions by the classifier's own chat template, and reads its logits.

    Args:
        name: name of the classifier in messages. spec: its folder and label. max_model_len: most tokens of a question.
        compute_logits: computes the logits.
    """

    def __init__(self, name: str, spec: ClassifierSpec, max_model_len: int, compute_logits: LogitsFn):
        self.name, self._spec, self._room, self._compute_logits = name, spec, max_model_len, compute_logits
        self._tokenizer: Any = load_tokenizer(spec.folder, answers=False)

    def answer(self, contents: Sequence[Any], seed: int) -> list[Verdict]:
        """Answer questions, in order, each a text or chat messages; ``seed`` is of judges."""
        found: list[Verdict | list[int]] = []
        for content in contents:
            try:
                found.append(self._encode(content))
            except Exception as error:  # a chat template may raise anything
                found.append(Verdict(error=f"classifier {self.name!r}: {error}"))
        prompts = [each for each in found if not isinstance(each, Verdict)]
        scored = iter(self._compute_logits(prompts) if prompts else [])
        return [each if isinstance(each, Verdict) else self._read(next(scored)) for each in found]

    def _encode(self, content: Any) -> list[int]:
        if isinstance(content, str):
            ids = self._tokenizer(content)["input_ids"]  # with the special tokens at both ends, as it was trained
        elif isinstance(content, Sequence):
            if not self._tokenizer.chat_template:
                raise ValueError("its tokenizer has no chat template; give it a text")
            text = self._tokenizer.apply_chat_template(content, tokenize=False)
            (ids,) = encode_prompts(self._tokenizer, [text], [False])
        else:
            raise ValueError("it takes a text or chat messages; ask it by policy.score")
        if not 0 < len(ids) <= self._room:
            raise ValueError(
                f"a question has {len(ids)} tokens, and it takes from 1 to {self._room}; raise "
                f"--models.{self.name}.max-model-len"
            )
        return ids

    def _read(self, logits: np.ndarray) -> Verdict:
        scores = logits[:, self._spec.place].tolist()
        return Verdict(scores[-1], values=tuple(scores) if self._spec.task == "token_classify" else ())
