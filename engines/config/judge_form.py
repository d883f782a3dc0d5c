"""The file of a judge: its prompt, and the form in which it gives a verdict."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from engines.config.verdicts import cut_thinking, read_boolean, read_score
from engines.validation import check_types

_SET_BY_QUESTIONS = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables of a chat template that are set with each question."""


@dataclass(frozen=True)
class JudgeForm:
    """The prompt of a judge, and the form of its verdict, which is a number from 0 to 1.

    Attributes:
        verdict: ``score``: the score that the answer names, or its only number, which ``range`` maps to 0 and 1.
            ``boolean``: the yes, true, no or false of the answer. ``choice``: the probabilities of ``options`` at the
            start of the answer, of which nothing is sampled.
        prompt: Jinja template of the user's message. It has the fields of a question, and ``rubric``.
        system: Jinja template of a system message; empty for none.
        range: lowest and highest score.
        options: text of each option -> its value from 0 to 1. The verdict is the mean over the options' probabilities.
        rubric: text of each criterion -> its weight. Each is a question of its own, and the verdict is their weighted
            mean. Empty asks once.
        max_tokens: most tokens of an answer. temperature: 0 is greedy.
        chat_template_args: variables of the judge's chat template and their values, such as ``enable_thinking``.
    """

    verdict: Literal["score", "boolean", "choice"]
    prompt: str
    system: str = ""
    range: tuple[float, ...] = (0.0, 10.0)
    options: dict[str, float] = field(default_factory=dict)
    rubric: dict[str, float] = field(default_factory=dict)
    max_tokens: int = 256
    temperature: float = 0.0
    chat_template_args: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, file: str) -> "JudgeForm":
        """Read a judge's file.

        Raises:
            ValueError: the file cannot be read, or has a key or a value that a judge does not take.
        """
        try:
            found = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: cannot be read as TOML: {error}; write prompt = '''...''' in it") from None
        names = [each.name for each in fields(cls)]
        if unknown := sorted(found.keys() - {*names}):
            raise ValueError(f"{file}: {unknown[0]!r} is no key of a judge; take one of {', '.join(names)}")
        if lacking := [name for name in ("verdict", "prompt") if name not in found]:
            raise ValueError(f"{file}: has no {lacking[0]}; a judge needs verdict and prompt")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in found.items()
        }
        form = cls(**values)
        form._check(file)
        return form

    def _check(self, file: str) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            check_types("judge", self)
        except ValueError as error:
            raise ValueError(f"{file}: {str(error).partition(';')[0]}; change it in the file") from None
        if not (len(self.range) == 2 and self.range[0] < self.range[1]):
            raise ValueError(f"{file}: range={self.range} must be a lowest and a highest score, such as [1, 10]")
        if (self.verdict == "choice") != bool(self.options):
            raise ValueError(f"{file}: options belong to verdict='choice', such as options = {{good = 1, bad = 0}}")
        if wrong := {text: value for text, value in self.options.items() if not 0 <= value <= 1}:
            raise ValueError(f"{file}: options has {wrong}, expected values from 0 to 1")
        if not all(weight > 0 for weight in self.rubric.values()):
            raise ValueError(f"{file}: rubric has weights {[*self.rubric.values()]}, expected numbers above 0")
        if self.max_tokens < 1 or not 0 <= self.temperature <= 2:
            raise ValueError(
                f"{file}: max_tokens={self.max_tokens} and temperature={self.temperature}, expected 1 or more tokens "
                "and a temperature from 0 to 2"
            )
        if clashes := sorted(_SET_BY_QUESTIONS & {*self.chat_template_args}):
            raise ValueError(
                f"{file}: chat_template_args may not set {clashes}, which each question sets; leave them out"
            )
        try:
            for text in (self.system, self.prompt):
                _compile(text)
        except TemplateSyntaxError as error:
            raise ValueError(f"{file}: the template is wrong in its line {error.lineno}: {error.message}") from None

    @property
    def answer_tokens(self) -> int:
        """Most tokens that are sampled of an answer; none of a choice, of which vLLM still counts one."""
        return 1 if self.verdict == "choice" else self.max_tokens

    @property
    def criteria(self) -> tuple[tuple[str, float], ...]:
        """Text and weight of each criterion; one without a text where there is no rubric."""
        return tuple(self.rubric.items()) or (("", 1.0),)

    def render(self, fields: Mapping[str, Any], criterion: str) -> list[dict[str, str]]:
        """Write the chat messages of a question on one criterion.

        Raises:
            ValueError: the template has a field that the question lacks, or cannot be filled.
        """
        try:
            values, roles = {**fields, "rubric": criterion}, (("system", self.system), ("user", self.prompt))
            return [{"role": role, "content": _compile(text).render(values)} for role, text in roles if text]
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the template cannot be filled: {error}; the question has {sorted(fields)}") from None

    def read_verdict(self, text: str) -> float | None:
        """Read the verdict in an answer, behind its thinking; None where there is none, or where it is not clear."""
        answer = cut_thinking(text)
        if self.verdict == "boolean":
            is_true = read_boolean(answer)
            return None if is_true is None else float(is_true)
        low, high = self.range
        score = read_score(answer, low, high)
        return None if score is None else (score - low) / (high - low)


@cache
def _compile(text: str) -> Any:
    """Compile a Jinja template, in which a field that a question lacks is an error."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(text)
