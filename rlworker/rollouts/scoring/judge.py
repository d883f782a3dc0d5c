"""A judge answers questions: a chat model writes, and its verdict is read; or its options are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.batch.samples import Completion, Request, Sampling
from engines.config.judge_form import JudgeForm
from rlworker.data.encoding import encode_after, encode_prompts
from rlworker.data.rows import list_stop_tokens, load_tokenizer
from rlworker.environments.record import Verdict

_RETRY_TEMPERATURE = 0.7
"""Least temperature of a second try, since a greedy one would be as unreadable as the first."""
SampleFn = Callable[[list[Request], int], list[Completion]]
"""``sample(requests, seed)`` returns a completion for each request."""


@dataclass
class _Question:
    """A question on one criterion: its ids, and the answer once it is there."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    value: float | None = None


class Judge:
    """Asks a chat model, and reads its verdicts.

    Args:
        name: name of the judge in messages. folder, vocab: the model's. form: prompt, and form of the verdict.
        max_model_len: most tokens of a question and its answer.
        sample: samples the model.
    """

    def __init__(self, name: str, folder: str, vocab: int, form: JudgeForm, max_model_len: int, sample: SampleFn):
        self.name, self.form, self._sample = name, form, sample
        self._tokenizer: Any = load_tokenizer(folder, form.chat_template_args, section=f"models.{name}.template")
        self._stops = list_stop_tokens(folder, self._tokenizer, vocab)
        self._options = [encode_after(self._tokenizer, None, text) for text in form.options]
        answer = max(map(len, self._options), default=0) + 1 if form.verdict == "choice" else form.max_tokens
        self._room = max_model_len - answer

    def answer(self, contents: Sequence[Any], seed: int) -> list[Verdict]:
        """Answer questions, in order. The same questions and seed give the same verdicts.

        Args:
            contents: fields of each question's prompt by name.
        """
        verdicts: list[Verdict | None] = []
        asked: list[list[_Question]] = []
        for fields in contents:
            try:
                asked.append([self._write(fields, criterion) for criterion, _ in self.form.criteria])
                verdicts.append(None)
            except ValueError as error:
                verdicts.append(Verdict(error=f"judge {self.name!r}: {error}"))
        questions = [question for each in asked for question in each]
        if self.form.verdict == "choice":
            self._compare(questions, seed)
        else:
            self._read(questions, self.form.temperature, seed)
            unread = [question for question in questions if question.value is None]
            self._read(unread, max(self.form.temperature, _RETRY_TEMPERATURE), seed + 1)
        answered = iter(asked)
        return [verdict or self._sum_up(next(answered)) for verdict in verdicts]

    def _write(self, fields: Any, criterion: str) -> _Question:
        if not isinstance(fields, Mapping):
            raise ValueError("it takes fields by name; ask it by policy.judge")
        messages = self.form.render(fields, criterion)
        if self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            (ids,) = encode_prompts(self._tokenizer, [text], [False])
        else:
            text = "\n\n".join(message["content"] for message in messages)
            (ids,) = encode_prompts(self._tokenizer, [text], [True])
        if len(ids) > self._room:
            raise ValueError(
                f"a question has {len(ids)} tokens, and there is room for {self._room} beside the answer; raise "
                f"--models.{self.name}.max-model-len"
            )
        return _Question(tuple(ids))

    def _read(self, questions: Sequence[_Question], temperature: float, seed: int) -> None:
        """Sample an answer to each question, and read it."""
        if not questions:
            return
        sampling = Sampling(1, temperature, self.form.max_tokens, (), self._stops)
        completions = self._sample([Request(question.token_ids, sampling) for question in questions], seed)
        for question, completion in zip(questions, completions, strict=True):
            question.text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            # An answer that was cut at its length may not have come to its verdict.
            question.value = self.form.read_verdict(question.text) if completion.finished else None

    def _compare(self, questions: Sequence[_Question], seed: int) -> None:
        """Compare the logprobs of the options behind each question."""
        sampling = Sampling(1, 1.0, 1, (), self._stops, scores_prompt=True)
        requests = [Request((*question.token_ids, *ids), sampling) for question in questions for ids in self._options]
        scored = iter(self._sample(requests, seed) if requests else [])
        texts, values = list(self.form.options), np.fromiter(self.form.options.values(), float)
        for question in questions:
            found = [next(scored).logprobs[-len(ids) :].astype(np.float64).sum() for ids in self._options]
            chances = np.exp(np.asarray(found) - max(found))
            question.value = float(chances @ values / chances.sum())
            question.text = texts[int(np.argmax(found))]

    def _sum_up(self, questions: Sequence[_Question]) -> Verdict:
        """Return the verdict on a question from its criteria: the weighted mean of those that could be read."""
        texts = tuple(question.text for question in questions)
        weights = [weight for _, weight in self.form.criteria]
        read = [(one.value, weight) for one, weight in zip(questions, weights, strict=True) if one.value is not None]
        unreadable = len(questions) - len(read)
        if not read:
            return Verdict(0.0, texts, (), unreadable, f"judge {self.name!r}: no verdict in {texts[0]!r:.200}")
        value = sum(value * weight for value, weight in read) / sum(weight for _, weight in read)
        return Verdict(value, texts, tuple(value for value, _ in read), unreadable)
